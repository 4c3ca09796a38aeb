"""Slices: students of any shape whose initial weights are cut from a teacher."""
