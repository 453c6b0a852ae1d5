"""What a run did, for people and programs."""
