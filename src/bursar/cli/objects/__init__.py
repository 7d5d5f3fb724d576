"""Commands on objects of any kind, as kubectl has them: get, describe, apply, edit, delete, watch."""
