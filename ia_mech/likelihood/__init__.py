"""The likelihood of given user turns after their own and after other contexts."""
