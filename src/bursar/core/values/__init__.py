"""Plain values that every area uses: quantities, durations, money, names, selectors, patches, refusals, roles.

None of them knows an object. Read `refusal.py` first: every expected "no" is one of its codes.
"""
