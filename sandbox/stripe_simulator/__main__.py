"""python -m sandbox.stripe_simulator --port PORT --state FILE"""

import sys

from sandbox.stripe_simulator.app import main

if __name__ == "__main__":
    sys.exit(main())
