package workspace

import (
	"errors"
	"fmt"

	"constellation/engine/cloud/machines"
	"constellation/engine/plan"
)

// Machine is a machine of the list in the configuration.
type Machine = machines.Machine

// ValidMachineName reports whether a machine of the list, and its Node, can have a name.
func ValidMachineName(s string) bool { return machines.ValidName(s) }

// ValidTPM reports whether s is the address of a TPM that a machine of the list can have.
func ValidTPM(s string) bool { return machines.ValidTPM(s) }

// MachineList is what a workspace says about its enrolled machines.
type MachineList struct {
	// Cluster is the name of the cluster. UID identifies its machines; empty before the first one.
	Cluster, UID string
	Machines     []Machine
}

// MachineList reads the list. Unlike Enrolment it writes nothing.
func (w *Workspace) MachineList() (MachineList, error) {
	c, err := w.Config()
	if err != nil {
		return MachineList{}, err
	}
	if c.Provider.Name != machines.Enrolled {
		return MachineList{}, &plan.Error{
			Op: "list enrolled machines", Err: fmt.Errorf("%s has the provider %s%s", w.Path(ConfigFile), c.Provider.Name, c.At("provider")), Exit: plan.ExitUsage,
			Remedy: "run `constellation status` for these machines, or name a workspace of `constellation machine add` with -C",
		}
	}
	l := MachineList{Cluster: c.Name, Machines: machines.List(c.Provider.Section)}
	s, err := w.State()
	switch {
	case errors.Is(err, ErrAbsent): // no machine was added
	case err != nil:
		return MachineList{}, err
	default:
		l.UID = s.Infrastructure.UID
	}
	return l, nil
}
