"""From which size on is it faster to share a parameter's update between ranks?"""
