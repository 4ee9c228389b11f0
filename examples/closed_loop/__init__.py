"""The closed loop: does acting on Foreshock's advice keep tiny, real runs from a collapse, and does anything else?"""
