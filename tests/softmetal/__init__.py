"""A software Metal for Linux: compiles `.metal` sources and runs them, lane by lane."""
