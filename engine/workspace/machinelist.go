package workspace

import (
	"errors"
	"fmt"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/plan"
)

// Machine is a machine of the list in the configuration.
type Machine = machines.Machine

// Role is the role of a machine.
type Role = cloud.Role

// Balancer is the load balancer that control planes of the list get.
type Balancer = machines.Balancer

// ValidMachineName reports whether a machine of the list, and its Node, can have a name.
func ValidMachineName(s string) bool { return machines.ValidName(s) }

// ValidTPM reports whether s is the address of a TPM that a machine of the list can have.
func ValidTPM(s string) bool { return machines.ValidTPM(s) }

// MachineSettings returns labels and taints, each a value of a flag such as key=value and key=value:Effect, as a row of the
// list has them.
func MachineSettings(labels, taints []string) (labelsText, taintsText string, err error) {
	l, err := machines.ParseLabels(strings.Join(labels, ","))
	if err != nil {
		return "", "", &plan.Error{Op: "read --label", Err: err, Remedy: "write --label key=value for each", Exit: plan.ExitUsage}
	}
	t, err := machines.ParseTaints(strings.Join(taints, ","))
	if err != nil {
		return "", "", &plan.Error{Op: "read --taint", Err: err, Remedy: "write --taint key=value:Effect for each", Exit: plan.ExitUsage}
	}
	return machines.LabelsText(l), machines.TaintsText(t), nil
}

// MachineList is what a workspace says about its machines, if it has a list of them.
type MachineList struct {
	// Cluster is the name of the cluster. UID identifies its enrolled machines; empty before the first one.
	Cluster, UID string
	// Adopted is whether kubeadm made the cluster, so that its machines were not enrolled.
	Adopted  bool
	Machines []Machine
	// Balancer is the one that control planes get; nil: none.
	Balancer *machines.Balancer
}

// Enrolled returns an error if the machines were not enrolled.
func (l *MachineList) Enrolled() error {
	if !l.Adopted {
		return nil
	}
	return &plan.Error{
		Op: "change the machines of cluster " + l.Cluster, Err: errors.New("the cluster was adopted: its machines were not enrolled"), Exit: plan.ExitUsage,
		Remedy: "add and remove nodes with kubeadm, correct provider.machines.machines in " + ConfigFile + ", then run `constellation adopt --operator`",
	}
}

// MachineList reads the list. Unlike Enrolment it writes nothing.
func (w *Workspace) MachineList() (MachineList, error) {
	c, err := w.Config()
	if err != nil {
		return MachineList{}, err
	}
	if !HasMachineList(c) {
		return MachineList{}, &plan.Error{
			Op: "list machines", Err: fmt.Errorf("%s has the provider %s%s", w.Path(ConfigFile), c.Provider.Name, c.At("provider")), Exit: plan.ExitUsage,
			Remedy: "run `constellation status` for these machines, or name a workspace of `constellation machine add` with -C",
		}
	}
	l := MachineList{Cluster: c.Name, Adopted: c.Provider.Name == machines.Name, Machines: machines.List(c.Provider.Section), Balancer: machines.BalancerOf(c.Provider.Section)}
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

// HasMachineList reports whether a configuration lists machines: enrolled ones, or those of an adopted cluster.
func HasMachineList(c *Config) bool {
	return c.Provider.Name == machines.Enrolled || c.Provider.Name == machines.Name
}
