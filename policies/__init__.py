"""What runs next: the mechanism (`policies.core`) and the decisions that steer it."""
