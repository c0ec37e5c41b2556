"""Checkpoints: training state that resumes on another layout."""
