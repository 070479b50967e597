"""At home in other people's trainers: what they need beyond an ordinary torch optimizer."""
