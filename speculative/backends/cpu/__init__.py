"""The CPU backend: kernels in C++, their bindings, and weights prepacked for them or for XLA."""
