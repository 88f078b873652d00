"""The least Redis ACL rule for a role."""
