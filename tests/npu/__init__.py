"""What stands in for an Ascend device in tests: references of the vendor's operators and what runs them."""
