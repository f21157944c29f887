package tui

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"constellation/engine/callhome"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/workspace"
)

// nameAddress is the name of the arguments of machines that call, in place of a flag.
const nameAddress = "NAME=ADDRESS"

// invalid returns an error if the value of one flag of `machine add` is not valid alone. Verb and console validate by it.
func (a *adding) invalid(flag string) (err error) {
	switch flag {
	case "--ssh":
		_, err = a.ssh.logins()
	case "--key":
		err = a.ssh.keyFile()
	case "--jump":
		_, err = a.ssh.jumpHosts()
	case "--host-key":
		err = sshhost.CheckFingerprints(a.ssh.hostKeys)
	case "--group":
		_, err = machinecheck.ParseRole(a.group)
	case "--name":
		if a.name != "" && !workspace.ValidMachineName(a.name) {
			return badFlag(fmt.Errorf("--name %q cannot name a node", a.name), "use at most 253 of a-z, 0-9, - and .")
		}
	case "--address":
		err = ipFlag(flag, a.address)
	case "--label":
		_, _, err = workspace.MachineSettings(a.labels, nil)
	case "--taint":
		_, _, err = workspace.MachineSettings(nil, a.taints)
	case "--tpm":
		if a.tpm != "auto" && a.tpm != "none" && !workspace.ValidTPM(a.tpm) {
			return badFlag(fmt.Errorf("--tpm %q is no TPM", a.tpm), "write auto, none, /dev/tpmrm0, or unix: and a socket in a folder of /run or /var/lib whose name contains tpm")
		}
	case "--tpm-roots":
		_, err = a.vendors()
	case "--proxy":
		if a.proxy != "" && !enrol.ValidProxy(a.proxy) {
			return badFlag(errors.New("--proxy is no address of an HTTP proxy"), "write it as http://HOST:PORT, without a password: files of the machine would show it")
		}
	case "--packages":
		err = folderFlag("read packages", flag, a.packages)
	case "--programs":
		err = folderFlag("read programs", flag, a.programs)
	default:
		err = a.call.invalid(flag)
	}
	return err
}

// invalid returns an error if the value of one flag of machines that call is not valid alone.
func (c *calling) invalid(flag string) (err error) {
	switch flag {
	case "--listen":
		_, _, err = callhome.ParseListen(c.listen)
	case "--source":
		err = ipFlag(flag, c.source)
	case "--valid-for":
		if c.validFor < time.Minute || c.validFor > 24*time.Hour {
			return badFlag(fmt.Errorf("--valid-for is %s, want 1m to 24h", c.validFor), "omit it for the default")
		}
	}
	return err
}

func ipFlag(flag, value string) error {
	if _, err := netip.ParseAddr(value); value != "" && err != nil {
		return badFlag(fmt.Errorf("%s %q is no IP address", flag, value), "write the address without a port")
	}
	return nil
}

// folderFlag returns an error if a folder of this computer is none.
func folderFlag(op, flag, dir string) error {
	if dir == "" {
		return nil
	}
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is no folder", dir)
	}
	if err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "name a folder with " + flag, Exit: plan.ExitUsage}
	}
	return nil
}
