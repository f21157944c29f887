package decision

// rule is one condition of the policy. Branches of decide on which safety or progress
// depends ask for their rule by name, so that a test can switch one off and show that
// the explorer finds what it is there for. Conditions without a name are those that
// others stand in for: without one of them alone nothing goes wrong.
type rule int

const (
	everyRule rule = iota // none is switched off

	// Safety: without the condition the action is not taken.
	ruleAutoscalerStopped   // nothing is begun or created while the autoscaler may act too
	ruleStrayBudget         // machines of ours that lost their intent count as well
	ruleWholeList           // nothing is begun or created while not all machines are listed
	ruleCountedTwice        // the budget is counted again before a machine is created
	ruleControlPlaneFirst   // no worker is begun while a control plane is not done
	ruleOneControlPlane     // control planes use the first place only
	ruleGroupImage          // nothing is created before the group has the target's image
	rulePublishedFirst      // nothing is created before its role is given the target's components
	ruleKnown               // a node of which too little is known is left alone
	ruleHeirVersion         // an heir of another version is given up
	ruleHeirReady           // a donor is touched only when its heir is Ready
	ruleHeirOpen            // an heir that somebody else cordoned is no heir yet
	ruleDrained             // a donor goes only when nothing is left on it
	ruleLeavingDrained      // whatever else goes is emptied as well
	ruleMemberFirst         // a control plane's machine goes only after its etcd member
	ruleMembersHealthy      // no member is removed while another one is not healthy
	ruleLeaderMoved         // the leader of etcd is moved off before its member goes
	ruleLeaseMoved          // the operator leaves a node before its turn
	ruleGone                // an intent ends only when the cloud confirms that the machine is gone
	ruleUnseenKept          // an intent whose machine was not seen is kept until its deadline
	ruleNoLateCreate        // nothing is created after the deadline of its intent
	ruleForeignCordon       // what others cordoned is not uncordoned
	ruleNeverDown           // Kubernetes never goes down
	ruleOnce                // a finished upgrade of Kubernetes is published, not repeated
	ruleAgentFirst          // control planes are given what the agent has finished
	ruleWorkersLast         // workers are given the target after the last control plane has it
	ruleStoppedBegins       // nothing is begun while paused or cancelled
	ruleKeepWorkers         // kept workers are kept
	ruleHeld                // what its owner holds is left as it is
	ruleInPlace             // nodes of groups that are upgraded in place are not replaced
	ruleInPlaceDrained      // a node's agent begins only when nothing is left on the node
	ruleInPlaceMembers      // and on a control plane only while every member of etcd is healthy
	ruleInPlaceEnds         // what an agent has begun is let end
	ruleInPlaceNoted        // a node has the components that its agent has finished, and no others
	ruleInPlaceReady        // an upgraded node is uncordoned when it is Ready
	ruleWorkBeforeGivenBack // the autoscaler is not given back while anything is under way
	ruleOthersAutoscaler    // an autoscaler that somebody else stopped is not started
	ruleStrayDeadline       // a machine without a Node is given time to join
	ruleMachinesName        // a Node counts only if its machine in the cloud bears its name
	ruleUnknownKept         // a Node whose machine the cloud does not describe is left alone
	ruleCloudGroup          // a node's group and role are those of its machine in the cloud
	ruleCloudImage          // a node's image is that of its machine in the cloud
	ruleMadeFor             // which node a machine replaces follows from its token, not from its Node
	ruleOwnVersions         // the kubelets of workers refuse no target

	// Progress: without the branch something is never done.
	ruleGiveBack      // the autoscaler is given back
	ruleOverdue       // a machine that does not join in time is given up
	ruleUnseenOverdue // an intent whose machine never appeared is ended
	ruleBlockedGoesBy // a drain that is blocked gives its place to others
	ruleUncordon      // what we cordoned and do not need is uncordoned
	ruleTrack         // machines that nobody tracks are tracked
	ruleRevive        // a control plane whose heir is lost before its member left stays
	ruleDeadMember    // a member without machine and Node is removed
	ruleHalfGone      // a control plane that has left etcd goes, though its intent was deleted
	ruleHeirVotes     // it also goes if its cordon was taken off, and its heir votes
	ruleHeirStays     // the heir of a control plane that has left etcd is not given up
	ruleDeadNode      // a Node whose machine is gone is removed
	ruleVanishedDonor // a replacement whose donor is gone ends
	ruleSecondPublish // workers are given the target in the end
	ruleRetry         // a failed upgrade of Kubernetes is tried again
	ruleInPlaceEnough // an upgrade in place that is not wanted any more is given up
	ruleInPlaceStuck  // a node whose upgrade fails keeps no other group from its turn
	ruleHeirDenies    // an heir that denies its donor is given up
	ruleNeverReady    // a machine whose Node is never Ready is given up
	ruleRevoked       // a revoked machine goes without a drain

	rules
)

// must is for conditions of safety: it returns ok, and true if the rule is switched off.
func (d *Decision) must(r rule, ok bool) bool { return ok || d.off == r }

// when is for branches of progress: it returns ok, and false if the rule is switched off.
func (d *Decision) when(r rule, ok bool) bool { return ok && d.off != r }
