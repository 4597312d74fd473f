"""One file a topic; each registers its cases, and every file here is found by itself."""
