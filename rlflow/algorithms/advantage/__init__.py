"""Advantage estimators: rewards of a group in, one advantage an episode out. Plain Python: the driver calls them."""
