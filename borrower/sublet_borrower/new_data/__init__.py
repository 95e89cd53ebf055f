"""When a session looks for new messages: after a notification, or after a silence."""
