"""What a call changes for as long as it runs, and files that it writes."""
