package build

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"constellation/internal/ocipack"
)

// kube-proxy programs the packet filter through other programs. They come from the
// Debian packages that this computer's apt would install, with the shared libraries
// that they load; nothing is installed, and nothing of this computer's own files is
// taken.
var (
	toolPackages = []string{"nftables", "iptables", "conntrack", "iproute2"}
	// toolFiles are patterns of what is wanted of the packages. Of those in a list one is
	// enough: a newer Debian has it elsewhere.
	toolFiles = [][]string{
		{"usr/sbin/nft", "sbin/nft"},
		{"usr/sbin/xtables-nft-multi", "sbin/xtables-nft-multi"},
		{"usr/lib/*/xtables/*.so", "lib/*/xtables/*.so"}, // matches and targets of iptables, loaded by name
		{"usr/sbin/conntrack", "sbin/conntrack"},
		{"usr/bin/ip", "bin/ip"},
	}
	// toolLinks are what Debian's alternatives would make, always for nf_tables.
	toolLinks = map[string]string{
		"/usr/sbin/iptables":          "xtables-nft-multi",
		"/usr/sbin/iptables-save":     "xtables-nft-multi",
		"/usr/sbin/iptables-restore":  "xtables-nft-multi",
		"/usr/sbin/ip6tables":         "xtables-nft-multi",
		"/usr/sbin/ip6tables-save":    "xtables-nft-multi",
		"/usr/sbin/ip6tables-restore": "xtables-nft-multi",
	}
	// toolContents are files of no package. Without names of protocols nft lists "6"
	// where kube-proxy has written "tcp". A kube-proxy that starts over the rules of
	// another then takes each entry of its maps for a stale one beside its own, and
	// removes the only one there is: until its next start no service answers.
	toolContents = map[string]string{
		"/etc/protocols": "icmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\nipv6-icmp 58 IPv6-ICMP\nsctp 132 SCTP\n",
	}
)

// libraryDirs are where a package may have its shared libraries.
var libraryDirs = []string{"lib/*-linux-gnu*", "usr/lib/*-linux-gnu*", "lib", "usr/lib", "lib64", "usr/lib64"}

var errNoDebian = errors.New("apt-get and dpkg-deb are not here")

// tools fetches the packages and adopts a layer with what is wanted of them.
func (b *builder) tools(ctx context.Context) error {
	for _, name := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(name); err != nil {
			return &Error{Op: "unpack Debian packages", Err: errNoDebian, Remedy: "build on Debian or Ubuntu, or copy a finished cache from there"}
		}
	}
	b.meter.say(StageTools, "fetching Debian packages: "+strings.Join(toolPackages, ", "))
	stage, remove, err := b.stage()
	if err != nil {
		return err
	}
	defer remove()
	d := &debs{dir: filepath.Join(stage, "debs"), tree: filepath.Join(stage, "tree"), private: filepath.Join(stage, "apt"), versions: make(map[string]string)}
	for _, dir := range []string{d.dir, d.tree} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	files, err := d.collect(ctx)
	if err != nil {
		return err
	}
	var entries []ocipack.File
	for path, file := range files {
		entries = append(entries, ocipack.File{Path: path, From: file, Mode: 0o755})
	}
	for path, target := range toolLinks {
		entries = append(entries, ocipack.File{Path: path, Link: target})
	}
	for path, content := range toolContents {
		entries = append(entries, ocipack.File{Path: path, Content: content, Mode: 0o644})
	}
	layer, err := ocipack.NewLayer(b.recipe.date, entries)
	if err != nil {
		return err
	}
	out := filepath.Join(stage, "layer.tar")
	if err := layer.WriteFile(out); err != nil {
		return err
	}
	var from []string
	for _, name := range slices.Sorted(maps.Keys(d.versions)) {
		from = append(from, name+" "+d.versions[name])
	}
	if err := b.adopt(out, toolsPath, record{Key: toolsKey(b.recipe.date), From: from}); err != nil {
		return err
	}
	b.meter.advance(costTools, StageTools, fmt.Sprintf("took %d files from %d Debian packages", len(files), len(from)))
	return nil
}

// debs are Debian packages, unpacked over each other into one tree.
type debs struct {
	dir, tree string
	private   string            // apt's lists, if those of the computer do not do
	apt       []string          // options for every call of apt-get
	versions  map[string]string // of the packages in tree
}

// collect unpacks packages until the tree has the wanted files and all libraries they
// load. It returns the files by their absolute path in an image.
//
// Dependencies are followed one level at a time, and only to packages that are called
// after a library: the rest of what Debian asks for is for the installation.
func (d *debs) collect(ctx context.Context) (map[string]string, error) {
	wanted := toolPackages
	for {
		depends, err := d.fetch(ctx, wanted)
		if err != nil {
			return nil, err
		}
		files, lacking, err := closure(d.tree)
		if err != nil {
			return nil, err
		}
		if len(lacking) == 0 {
			return files, nil
		}
		wanted = slices.DeleteFunc(depends, func(name string) bool {
			return d.versions[name] != "" || !strings.Contains(name, "lib")
		})
		if len(wanted) == 0 {
			return nil, fmt.Errorf("find libraries of %s: no package has %s", strings.Join(toolPackages, ", "), strings.Join(lacking, ", "))
		}
	}
}

// fetch downloads and unpacks packages and returns the names that they depend on.
func (d *debs) fetch(ctx context.Context, names []string) ([]string, error) {
	download := func() error {
		args := slices.Concat(d.apt, []string{"-q", "-o", "APT::Sandbox::User=", "download"}, names)
		return d.command().run(ctx, "apt-get", args...)
	}
	err := download()
	if err != nil && d.apt == nil && ctx.Err() == nil {
		// No lists (a container image without them), or older than the archive. We make
		// lists of our own, as those of the computer are not ours to change.
		if err := d.update(ctx); err != nil {
			return nil, err
		}
		err = download()
	}
	if err != nil {
		return nil, err
	}
	packages, err := filepath.Glob(filepath.Join(d.dir, "*.deb"))
	if err != nil {
		return nil, err
	}
	var depends []string
	for _, file := range packages {
		fields, err := d.command().output(ctx, "dpkg-deb", "--show", "--showformat=${Package}\n${Version}\n${Depends}, ${Pre-Depends}\n", file)
		if err != nil {
			return nil, err
		}
		if len(fields) != 3 {
			return nil, fmt.Errorf("read %s: %d fields where there should be 3", filepath.Base(file), len(fields))
		}
		if err := d.command().run(ctx, "dpkg-deb", "--extract", file, d.tree); err != nil {
			return nil, err
		}
		if err := os.Remove(file); err != nil {
			return nil, err
		}
		d.versions[fields[0]] = fields[1]
		depends = append(depends, dependencies(fields[2])...)
	}
	slices.Sort(depends)
	return slices.Compact(depends), nil
}

// update makes apt's lists below d.private, with the sources and keys of the computer.
func (d *debs) update(ctx context.Context) error {
	lists, cache := filepath.Join(d.private, "lists"), filepath.Join(d.private, "cache")
	for _, dir := range []string{filepath.Join(lists, "partial"), filepath.Join(cache, "archives", "partial")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	d.apt = []string{"-o", "Dir::State::lists=" + lists, "-o", "Dir::Cache=" + cache}
	return d.command().run(ctx, "apt-get", slices.Concat(d.apt, []string{"-q", "-o", "APT::Sandbox::User=", "update"})...)
}

func (d *debs) command() command {
	return command{dir: d.dir, env: []string{"LC_ALL=C", "DEBIAN_FRONTEND=noninteractive"}}
}

// dependencies returns the names in a Depends field; of alternatives the first.
func dependencies(field string) []string {
	var names []string
	for _, clause := range strings.Split(field, ",") {
		name, _, _ := strings.Cut(clause, "|")
		name, _, _ = strings.Cut(name, "(")
		name, _, _ = strings.Cut(strings.TrimSpace(name), ":")
		if name != "" {
			names = append(names, name)
		}
	}
	return names
}

// closure returns the wanted files of a tree of packages and the libraries that they
// load, directly or not, by their path in an image; lacking are libraries (or wanted
// files) that the tree does not have.
//
// In the image programs and libraries are below /usr, whatever the package says,
// and the loader is where the programs look for it.
func closure(tree string) (files map[string]string, lacking []string, err error) {
	files = make(map[string]string)
	var todo []string // paths in files whose own needs are not known yet
	add := func(to, file string) {
		if files[to] == "" {
			files[to] = file
			todo = append(todo, to)
		}
	}
	root, err := os.OpenRoot(tree)
	if err != nil {
		return nil, nil, err
	}
	defer root.Close()
	for _, patterns := range toolFiles {
		found := false
		for _, pattern := range patterns {
			matches, err := fs.Glob(root.FS(), pattern)
			if err != nil {
				return nil, nil, err
			}
			for _, m := range matches {
				if isFile(root, m) {
					found = true
					add(belowUsr(m), filepath.Join(tree, m))
				}
			}
			if found {
				break
			}
		}
		if !found {
			lacking = append(lacking, patterns[0])
		}
	}
	for len(todo) > 0 {
		to := todo[0]
		todo = todo[1:]
		libraries, loader, err := needs(files[to])
		if err != nil {
			return nil, nil, fmt.Errorf("read %s: %w", path.Base(to), err)
		}
		for _, name := range libraries {
			dir, file, err := library(root, name)
			if err != nil {
				return nil, nil, err
			}
			if file == "" {
				lacking = append(lacking, name)
				continue
			}
			add(path.Join(belowUsr(dir), name), file)
		}
		if loader != "" {
			_, file, err := library(root, path.Base(loader))
			if err != nil {
				return nil, nil, err
			}
			if file == "" {
				lacking = append(lacking, path.Base(loader))
				continue
			}
			add(loader, file)
		}
	}
	slices.Sort(lacking)
	return files, slices.Compact(lacking), nil
}

func belowUsr(name string) string {
	name = strings.TrimPrefix(name, "usr/")
	return path.Join("/usr", name)
}

// library finds a library by its name in a tree. dir is where, file what it is once
// links are followed; file is empty if there is none.
func library(root *os.Root, name string) (dir, file string, err error) {
	for _, pattern := range libraryDirs {
		matches, err := fs.Glob(root.FS(), path.Join(pattern, name))
		if err != nil {
			return "", "", err
		}
		for _, m := range matches {
			if isFile(root, m) {
				return path.Dir(m), filepath.Join(root.Name(), m), nil
			}
		}
	}
	return "", "", nil
}

// isFile reports whether name is a file, or a link to one in the tree. Packages link
// libraries and modules to each other. A link that leaves the tree, as an absolute
// one does, is none: what it means is in the tree under its own name.
func isFile(root *os.Root, name string) bool {
	info, err := root.Stat(name)
	return err == nil && info.Mode().IsRegular()
}

// needs returns the libraries that an ELF file names, and its loader if it is a program.
func needs(file string) (libraries []string, loader string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	if libraries, err = f.ImportedLibraries(); err != nil {
		return nil, "", err
	}
	if s := f.Section(".interp"); s != nil {
		b, err := s.Data()
		if err != nil {
			return nil, "", err
		}
		loader = string(bytes.TrimRight(b, "\x00"))
	}
	return libraries, loader, nil
}
