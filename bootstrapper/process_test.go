package bootstrapper

func process(string) int { return 1 }
