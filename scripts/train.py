"""Trains a target as a gin file says; run again, it goes on where it stopped.

    python scripts/train.py --config=configs/training/target.gin --data_dir=data/tokenized \
        --work_dir=work/target --out_dir=work/pair/target
"""

import sys

from speculative.training import launch, train

if __name__ == "__main__":
    sys.exit(launch.main(train.train, __doc__))
