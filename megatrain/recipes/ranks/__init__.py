"""Ranks of one run: their launcher, how they meet, and how they notice that one has died."""
