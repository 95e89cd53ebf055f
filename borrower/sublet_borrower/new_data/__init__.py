"""Detecting that a granted stream has new messages: by push, else by polling after a silence."""
