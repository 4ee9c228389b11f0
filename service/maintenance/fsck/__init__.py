"""`foreshock fsck`: check the catalogue against the files of the token store, and repair what can be repaired."""
