"""Who holds what. Pure data: testable with no process group and no tensor."""
