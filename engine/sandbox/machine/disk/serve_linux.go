package disk

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Supported returns the reason why this computer cannot have faulty disks.
func Supported() error {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("disks that fail need FUSE: %w", err)
	}
	return f.Close()
}

// Main runs this program as the server of a disk, see [Args], and returns its exit code.
func Main(args []string) int {
	// Main's thread is the process's first, which the runtime never ends: it must not be the
	// one that enters the namespace.
	runtime.LockOSThread()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := serve(args[2], args[3], args[4], log); err != nil {
		log.Error("disk not served", "err", err)
		return 1
	}
	return 0
}

// maxRequest is the maximum size of a read or write by the kernel.
const maxRequest = 1 << 20

func serve(dir, name, target string, log *slog.Logger) (err error) {
	ready := os.NewFile(ReadyFD, "ready")
	defer func() {
		if err != nil && ready != nil {
			_, _ = ready.WriteString(err.Error())
		}
	}()
	namespace := os.NewFile(NamespaceFD, "namespace")
	if ready == nil || namespace == nil {
		return errors.New("internal command: the sandbox starts this process")
	}
	unix.Umask(0) // the kernel has applied the umask of the callers
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGHUP)
	settings, err := readSettings(SettingsFile(dir, name))
	if err != nil {
		return err
	}
	d, err := open(dir, name, settings)
	if err != nil {
		return err
	}
	root, err := d.node()
	if err != nil {
		return fmt.Errorf("open disk: %w", err)
	}
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/fuse: %w", err)
	}
	if err := mount(device, namespace, target); err != nil {
		return err
	}
	if err := namespace.Close(); err != nil {
		return err
	}
	second := time.Second
	server, err := fuse.NewServer(fs.NewNodeFS(root, &fs.Options{EntryTimeout: &second, AttrTimeout: &second}), "/dev/fd/"+strconv.Itoa(device), &fuse.MountOptions{MaxWrite: maxRequest})
	if err != nil {
		return fmt.Errorf("answer the kernel: %w", err)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		server.Serve()
	}()
	if _, err := ready.WriteString(Ready); err != nil {
		return err
	}
	if err := ready.Close(); err != nil {
		return err
	}
	ready = nil
	for {
		select {
		case <-gone: // with the last mount of it
			return nil
		case s := <-signals:
			if s == unix.SIGTERM {
				// No request is answered any more. The end of the process ends the waiting ones.
				return d.cut(log)
			}
			settings, err := readSettings(SettingsFile(dir, name))
			if err != nil {
				log.Error("disk stays as it was", "err", err)
				continue
			}
			d.set(settings)
		}
	}
}

// mount mounts the FUSE device on the directory target of a mount namespace,
// which must not be this process's.
func mount(device int, namespace *os.File, target string) error {
	var theirs, ours unix.Stat_t
	if err := errors.Join(unix.Fstat(int(namespace.Fd()), &theirs), unix.Stat("/proc/thread-self/ns/mnt", &ours)); err != nil {
		return fmt.Errorf("look at namespace: %w", err)
	}
	if theirs.Dev != ours.Dev || theirs.Ino == ours.Ino {
		return errors.New("mount disk: the namespace is not one of mounts that is another's")
	}
	configured, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("mount disk: %w", err)
	}
	defer unix.Close(configured)
	for _, o := range [][2]string{
		{"source", "constellation-disk"},
		{"subtype", "constellation"},
		{"fd", strconv.Itoa(device)},
		{"rootmode", "40000"},
		{"user_id", "0"},
		{"group_id", "0"},
		{"max_read", strconv.Itoa(maxRequest)},
	} {
		if err := unix.FsconfigSetString(configured, o[0], o[1]); err != nil {
			return fmt.Errorf("mount disk: %s: %w", o[0], err)
		}
	}
	for _, flag := range []string{"allow_other", "default_permissions"} {
		if err := unix.FsconfigSetFlag(configured, flag); err != nil {
			return fmt.Errorf("mount disk: %s: %w", flag, err)
		}
	}
	if err := unix.FsconfigCreate(configured); err != nil {
		return fmt.Errorf("mount disk: %w", err)
	}
	mounted, err := unix.Fsmount(configured, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return fmt.Errorf("mount disk: %w", err)
	}
	defer unix.Close(mounted) // the mount exists only if it was moved
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread, and its namespace, end here
		done <- move(mounted, int(namespace.Fd()), target)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("mount disk on %s: %w", target, err)
	}
	return nil
}

func move(mounted, namespace int, target string) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(namespace, unix.CLONE_NEWNS); err != nil {
		return err
	}
	there, err := unix.Open(target, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(there)
	return unix.MoveMount(mounted, "", there, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}
