"""``python -m benchmarks.algorithms``."""

from benchmarks.algorithms import main

if __name__ == "__main__":
    main()
