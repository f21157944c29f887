// Command man writes a manual page for each verb of constellation.
package main

import (
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra/doc"

	"constellation/engine/version"
	"constellation/tui"
)

func main() {
	dir := flag.String("o", "bin/man", "folder to write to")
	flag.Parse()
	if err := write(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "write manual pages:", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root := tui.App{
		Program: "constellation", Release: version.Release, Releases: []string{version.Release},
	}.Command()
	root.DisableAutoGenTag = true // the pages of a release do not depend on the day
	date := time.Unix(0, 0).UTC()
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "constellation " + version.Release, Manual: "constellation", Date: &date}, dir)
}
