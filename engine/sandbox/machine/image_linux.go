package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"constellation/assets"
	"constellation/engine/release"
)

// Names in a directory that OSImage has made.
const (
	imageLayer  = "layer"
	imageRecord = "image.json"
)

// Paths in an image's layer.
const (
	osReleasePath    = "usr/lib/os-release" // /etc/os-release links to it
	constellationDir = "usr/lib/constellation"
	bootstrapperPath = constellationDir + "/bootstrapper"
	agentPath        = constellationDir + "/agent"
	peersPath        = constellationDir + "/peers.json"
	releaseKeysPath  = release.MachineKeys
	unitsDir         = "usr/lib/systemd/system"
	wantsDir         = "etc/systemd/system/multi-user.target.wants"
)

// imageUnits run from the first boot on, and startedUnits when one of them starts them.
var (
	imageUnits   = []string{"constellation-bootstrapper.service", "constellation-agent.service", "constellation-certifier.path", "constellation-kms.path"}
	startedUnits = []string{"constellation-certifier.service", "constellation-kms.service"}
)

// imageVersion is the syntax of versions, which become a file name, and a line of
// os-release, which is shell.
var imageVersion = regexp.MustCompile(`^v?[0-9][0-9A-Za-z.+-]{0,63}$`)

// OSImage makes the OS image that spec describes: a layer over the root file system
// rootfs, which [Rootfs] has made. It makes an image of the same content once and then
// returns at once. Concurrent calls, even in other processes, are
// serialized. progress may be nil; it is called from one goroutine.
func OSImage(ctx context.Context, cacheDir, rootfs string, spec ImageSpec, progress func(Progress)) (*Image, error) {
	if !imageVersion.MatchString(spec.Version) {
		return nil, fmt.Errorf("make OS image: %q is no version", spec.Version)
	}
	if len(spec.Peers) == 0 {
		spec.Peers = []byte("[]\n")
	}
	if !json.Valid(spec.Peers) {
		return nil, fmt.Errorf("make OS image %s: the list of peers is no JSON", spec.Version)
	}
	start := time.Now()
	report := func(text string) {
		if progress != nil {
			progress(Progress{Text: text, Took: time.Since(start)})
		}
	}
	parent, err := filepath.Abs(filepath.Join(cacheDir, "os-images"))
	if err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	if err := checkOverlayPath(parent); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	unlock, err := lockFile(ctx, filepath.Join(parent, "lock"))
	if err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	defer unlock()
	if err := removeUnfinished(parent); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	fresh, err := os.MkdirTemp(parent, unfinished)
	if err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	defer func() { _ = removeTree(parent, filepath.Base(fresh)) }() // gone already after success
	report("writing OS image " + spec.Version)
	layer := filepath.Join(fresh, imageLayer)
	if err := writeLayer(layer, filepath.Join(rootfs, rootfsTree), spec); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	report("measuring OS image " + spec.Version)
	image := &Image{Version: spec.Version, Rootfs: rootfs}
	// The image's measurements become the reference values for machines, so they must not
	// come from modified files.
	if err := verifyRootfs(ctx, rootfs); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	if image.Events, err = measure(ctx, rootfs, layer, new(rootfsMemory)); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	// The name is the digest of what boots, so an image never changes under the machines
	// that use it: other content is another directory.
	h := sha256.New()
	for _, e := range image.Events {
		fmt.Fprintf(h, "%d %x\n", e.PCR, e.Digest)
	}
	image.Dir = filepath.Join(parent, spec.Version+"-"+hex.EncodeToString(h.Sum(nil))[:16])
	if err := writeJSON(filepath.Join(fresh, imageRecord), image); err != nil {
		return nil, err
	}
	if used(image.Dir) == nil {
		// It exists. Its content must still match its name.
		events, err := measure(ctx, rootfs, filepath.Join(image.Dir, imageLayer), new(rootfsMemory))
		if err != nil {
			return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
		}
		if !sameEvents(events, image.Events) {
			return nil, fmt.Errorf("make OS image %s: the files in %s were changed after they were made; remove that directory", spec.Version, image.Dir)
		}
		return image, nil
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	if err := os.Rename(fresh, image.Dir); err != nil {
		return nil, fmt.Errorf("make OS image %s: %w", spec.Version, err)
	}
	return image, nil
}

// writeLayer writes an image's files.
func writeLayer(layer, tree string, spec ImageSpec) error {
	osRelease, err := os.ReadFile(filepath.Join(tree, osReleasePath))
	if err != nil {
		return err
	}
	osRelease = append(bytes.TrimRight(osRelease, "\n"), "\nIMAGE_ID=constellation\nIMAGE_VERSION="+spec.Version+"\n"...)
	changes := []change{
		newFile{osReleasePath, osRelease, 0o644},
		newFile{peersPath, spec.Peers, 0o644},
	}
	if len(spec.ReleaseKeys) > 0 {
		changes = append(changes, newFile{releaseKeysPath, spec.ReleaseKeys, 0o644})
	}
	for _, u := range slices.Concat(imageUnits, startedUnits) {
		data, err := fs.ReadFile(assets.Systemd(), u)
		if err != nil {
			return err
		}
		changes = append(changes, newFile{unitsDir + "/" + u, data, 0o644})
		if slices.Contains(imageUnits, u) {
			changes = append(changes, newLink{wantsDir + "/" + u, "/" + unitsDir + "/" + u})
		}
	}
	if err := os.Mkdir(layer, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(layer, 0o755); err != nil { // override the umask
		return err
	}
	root, err := os.OpenRoot(layer)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, c := range changes {
		if err := c.apply(root); err != nil {
			return err
		}
	}
	if err := copyProgram(spec.Bootstrapper, root, bootstrapperPath); err != nil {
		return err
	}
	return copyProgram(spec.Agent, root, agentPath)
}

func copyProgram(from string, root *os.Root, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := root.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	if err := errors.Join(err, dst.Chmod(0o755), dst.Close()); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return nil
}

// verifyRootfs checks that the root file system is unmodified.
func verifyRootfs(ctx context.Context, rootfs string) error {
	var made content
	if err := readJSON(filepath.Join(rootfs, rootfsContent), &made); err != nil {
		return fmt.Errorf("read what the root file system held when it was made: %w", err)
	}
	now, err := scan(ctx, filepath.Join(rootfs, rootfsTree), made)
	if err != nil {
		return err
	}
	if name := made.difference(now); name != "" {
		return fmt.Errorf("%s in the root file system was changed after it was made; remove %s", name, rootfs)
	}
	return nil
}

// measure reads the files that will boot and returns the events of the boot. It reads the
// whole layer. The root file system has hundreds of megabytes, too much for a boot: measure
// compares every name, owner, mode and size with those found at its
// creation, and reads only files whose inode changed since.
func measure(ctx context.Context, rootfs, layer string, memory *rootfsMemory) ([]Event, error) {
	base, err := memory.scan(ctx, rootfs)
	if err != nil {
		return nil, err
	}
	over, err := scan(ctx, layer, nil)
	if err != nil {
		return nil, err
	}
	program, err := base.file("usr/lib/systemd/systemd")
	if err != nil {
		return nil, fmt.Errorf("measure first program: %w", err)
	}
	start, err := json.Marshal(bundle(bundleSpec{}))
	if err != nil {
		return nil, fmt.Errorf("measure start of machine: %w", err)
	}
	how := sha256.Sum256(start)
	bootstrapper, err := over.file(bootstrapperPath)
	if err != nil {
		return nil, fmt.Errorf("measure image: %w", err)
	}
	agent, err := over.file(agentPath)
	if err != nil {
		return nil, fmt.Errorf("measure image: %w", err)
	}
	return []Event{
		{PCR: PCRBoot, Digest: how[:], Description: "how the first program is started"},
		{PCR: PCRBoot, Digest: program, Description: "first program: /lib/systemd/systemd"},
		{PCR: PCRRootfs, Digest: base.digest(), Description: "root file system"},
		{PCR: PCRImage, Digest: bootstrapper, Description: "/" + bootstrapperPath},
		{PCR: PCRImage, Digest: agent, Description: "/" + agentPath},
		{PCR: PCRImage, Digest: over.digest(), Description: "all files of the OS image"},
	}, nil
}

func sameEvents(a, b []Event) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].PCR != b[i].PCR || !bytes.Equal(a[i].Digest, b[i].Digest) {
			return false
		}
	}
	return true
}
