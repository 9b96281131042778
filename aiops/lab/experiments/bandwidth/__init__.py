"""What a byte buys: gates, codecs and budgets, trained over TCP and drawn beside each other."""
