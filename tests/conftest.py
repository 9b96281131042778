"""What every test relies on."""

import signal

from hypothesis import settings

# A machine that does other work, or compiles a kernel first, is no failure.
settings.register_profile("aiops", deadline=None)
settings.load_profile("aiops")

# A shell without job control makes its background commands deaf to Ctrl-C, and their children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
