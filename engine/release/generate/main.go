// Generate writes the lists and the index of the releases in the program with the publisher's
// code. `make generate` runs it.
package main

import (
	"fmt"
	"os"

	"constellation/engine/release"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate DIR, such as assets/releases")
		os.Exit(2)
	}
	if err := release.Generate(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
