"""Inside an island: everything that is synchronous. Useful alone; never imports ``diloco`` or hivemind."""
