"""Engines that share a device: where they meet, what they tell each other, and how one asks another for memory.

Knows no torch, no driver and no cache: bytes in, bytes out. Everything here belongs to one user (0700, 0600).
"""
