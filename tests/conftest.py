"""What every test relies on."""

import signal

# A shell without job control makes its background commands deaf to Ctrl-C, and their children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
