"""The libraries that are measured side by side: how each is started, and one worker script for each."""
