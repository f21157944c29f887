// Command cmd fetches Kubernetes into the cache for those who have no constellation
// binary yet: the Makefile, and people who work on package build.
//
//	go run ./engine/sandbox/build/cmd -version v1.35.4            # everything
//	go run ./engine/sandbox/build/cmd -only kubectl -o bin/kubectl # one binary, copied
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"constellation/engine/sandbox/build"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		var known *build.Error
		if errors.As(err, &known) {
			fmt.Fprintln(os.Stderr, "Remedy:", known.Remedy)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	user, err := os.UserCacheDir() // $XDG_CACHE_HOME, or ~/.cache
	if err != nil {
		return fmt.Errorf("find cache directory: %w", err)
	}
	version := flag.String("version", build.DefaultVersion, "one of "+strings.Join(build.Versions(), ", "))
	cache := flag.String("cache", filepath.Join(user, "constellation"), "cache `directory`")
	only := flag.String("only", "", "build nothing but the binary called `name`")
	out := flag.String("o", "", "copy the binary named by -only to this `file`")
	source := flag.Bool("from-source", false, "compile all programs")
	mirror := flag.String("mirror", "", "`URL` of a server with copies of the official files")
	flag.Parse()
	if flag.NArg() > 0 || *out != "" && *only == "" {
		flag.Usage()
		return errors.New("read arguments: -o goes with -only, and there are no others")
	}

	start := time.Now()
	if *only != "" {
		path, err := build.Binary(ctx, *cache, *version, *only, printer())
		if err != nil || *out == "" {
			return err
		}
		return place(path, *out)
	}
	a, err := build.Kubernetes(ctx, *cache, *version, build.Options{FromSource: *source, Mirror: *mirror}, printer())
	if err != nil {
		return err
	}
	fmt.Printf("Kubernetes %s: %d binaries and %d images in %s (%v)\n", a.Version, len(a.Binaries), len(a.Images), a.Dir, time.Since(start).Round(time.Millisecond))
	return nil
}

// printer prints a line when something new begins, and one every ten seconds.
func printer() func(build.Progress) {
	var stage build.Stage
	var last time.Duration
	return func(p build.Progress) {
		steps := p.Stage == build.StageLink || p.Stage == build.StageImage
		if p.Stage == stage && p.Took-last < 10*time.Second && !steps && !p.Notice {
			return
		}
		stage, last = p.Stage, p.Took
		line := fmt.Sprintf("%7s  %s", p.Took.Round(time.Second), p.Text)
		if p.Left > 0 {
			line += fmt.Sprintf(" (about %v left)", p.Left)
		}
		fmt.Fprintln(os.Stderr, line)
	}
}

// place copies a binary so that nobody ever runs half of it.
func place(from, to string) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	temp, err := os.CreateTemp(filepath.Dir(to), "."+filepath.Base(to)+"-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(temp.Name())
		}
	}()
	_, err = io.Copy(temp, in)
	if err := errors.Join(err, temp.Chmod(0o755), temp.Close()); err != nil {
		return fmt.Errorf("copy %s: %w", filepath.Base(from), err)
	}
	return os.Rename(temp.Name(), to)
}
