"""Mathematics as a reward reads it: answers in a reply, numbers, formulas, equality."""
