"""Checks of what cannot run here: the macOS build, the Objective-C signatures, arm64 code."""
