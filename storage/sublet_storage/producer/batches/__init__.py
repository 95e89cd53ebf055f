"""From a user's values to blocks: checked, turned into Arrow, and routed to streams."""
