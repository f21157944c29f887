package decision

// rule is one condition of the policy. Branches on which safety or progress depends name their
// rule. A test can switch a rule off and show that the explorer finds the resulting error.
// Conditions without a name are redundant: without one of them alone nothing goes wrong.
type rule int

const (
	everyRule rule = iota // none is switched off

	// Safety: without the condition the action is not taken.
	ruleAutoscalerStopped   // nothing starts and nothing is created while the autoscaler may act
	ruleOrphanBudget        // our machines without an intent (orphans) count too
	ruleWholeList           // nothing starts and nothing is created while the cloud's list is partial
	ruleCountedTwice        // the budget is counted again before a machine is created
	ruleControlPlaneFirst   // no worker starts while a control plane is not at the target
	ruleOneControlPlane     // control planes use the first surge slot only
	ruleGroupImage          // nothing is created before the group has the target's image
	rulePublishedFirst      // nothing is created before the target's components are published for its role
	ruleKnown               // a node is not changed before its image, components and machine are known
	ruleReplacementVersion  // a replacement node of another version is given up
	ruleReplacementReady    // an old node is touched only when its replacement node is Ready
	ruleReplacementOpen     // a replacement node that somebody else cordoned takes over nothing
	ruleDrained             // an old node leaves only when it is drained
	ruleLeavingDrained      // every other machine that leaves is drained too
	ruleMemberFirst         // a control plane's machine is deleted only after its etcd member
	ruleMembersHealthy      // no member is removed while another one is not healthy
	ruleLeaderMoved         // etcd leadership moves before the member is removed
	ruleLeaseMoved          // the operator's leader leaves a node before the node is drained
	ruleGone                // an intent ends only when the cloud confirms that the machine is gone
	ruleUnseenKept          // an intent whose machine was not seen is kept until its deadline
	ruleNoLateCreate        // nothing is created after the deadline of its intent
	ruleForeignCordon       // cordons of others stay
	ruleNeverDown           // Kubernetes is never downgraded
	ruleOnce                // a finished upgrade of Kubernetes is published, not repeated
	ruleAgentFirst          // control planes get the components that the agent has installed
	ruleWorkersLast         // the target is published for workers after the last control plane has it
	ruleStoppedBegins       // nothing starts while paused or cancelled
	ruleKeepWorkers         // with keepWorkers, workers stay
	ruleHeld                // nodes on hold are not changed
	ruleInPlace             // nodes of groups that are upgraded in place are not replaced
	ruleInPlaceDrained      // a node's agent starts only when the node is drained
	ruleInPlaceKubelet      // the upgrade of the cluster's Kubernetes keeps the kubelet of such a node, which takes pods
	ruleInPlaceMembers      // and on a control plane only while every member of etcd is healthy
	ruleInPlaceEnds         // an agent's run is never interrupted
	ruleInPlaceNoted        // a Node gets the components that its agent has installed, and no others
	ruleInPlaceReady        // an upgraded node is uncordoned when it is Ready
	ruleWorkBeforeGivenBack // the autoscaler stays paused while anything is in progress
	ruleOthersAutoscaler    // an autoscaler that somebody else paused stays paused
	ruleOrphanDeadline      // a machine without a Node is given time to join
	ruleMachinesName        // a Node counts only if its machine in the cloud bears its name
	ruleUnknownKept         // a Node whose machine the cloud does not describe is not changed
	ruleCloudGroup          // a node's group and role are those of its machine in the cloud
	ruleCloudImage          // a node's image is that of its machine in the cloud
	ruleMadeFor             // which node a machine replaces follows from its token, not from its Node
	ruleOwnVersions         // the versions of workers' kubelets refuse no target
	ruleIncarnation         // a machine is identified by its ID and its incarnation
	ruleBareUnknown         // a Node that does not name the incarnation of its machine is not changed
	ruleSpentToken          // a token is not sent again after its machine was seen
	ruleDonorMachine        // the old node of a replacement is that of the old machine, not any Node of its name
	ruleAddonsLast          // add-ons are upgraded when every control plane is at the target
	ruleMemberAddress       // a member of etcd belongs to the machine of its name that has its address

	// Progress: without the branch something never happens.
	ruleGiveBack          // the autoscaler is resumed
	ruleOverdue           // a machine that does not join in time is given up (deleted)
	ruleUnseenOverdue     // an intent whose machine never appeared is ended
	ruleBlockedGoesBy     // a blocked drain releases its surge slot
	ruleUncordon          // nodes that the operator cordoned and that stay are uncordoned
	ruleTrack             // orphaned machines are tracked
	ruleRevive            // a control plane whose replacement node is lost before its member left stays
	ruleDeadMember        // a member without machine and Node is removed
	ruleHalfGone          // a control plane that has left etcd is removed, even if its intent was deleted
	ruleReplacementVotes  // it is also removed if its cordon is gone and its replacement node votes
	ruleReplacementStays  // the replacement node of a control plane that has left etcd is not given up
	ruleDeadNode          // a Node whose machine is gone is removed
	ruleVanishedOldNode   // a replacement whose old node is gone ends
	ruleSecondPublish     // the target is published for workers in the end
	ruleRetry             // a failed upgrade of Kubernetes is retried
	ruleInPlaceEnough     // an in-place upgrade that is no longer requested is given up
	ruleInPlaceStuck      // a node whose upgrade fails does not block other groups
	ruleReplacementDenies // a replacement node that denies its old node is given up
	ruleNeverReady        // a machine whose Node is never Ready is given up
	ruleAddons            // add-ons that the last control plane did not bring are upgraded
	ruleRevoked           // a revoked machine is removed without a drain

	rules
)
