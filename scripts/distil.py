"""Distils a draft from a target; run again, it goes on where it stopped.

    python scripts/distil.py --config=configs/training/draft.gin --target_dir=work/pair/target \
        --data_dir=data/tokenized --work_dir=work/draft --out_dir=work/pair/draft
"""

import sys

from speculative.training import distil, launch

if __name__ == "__main__":
    sys.exit(launch.main(distil.distil, __doc__, target_dir=True))
