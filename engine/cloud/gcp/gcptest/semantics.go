package gcptest

// Row is a rule of Compute Engine and the address of the page that documents it.
type Row struct{ Rule, Documentation string }

const (
	reference  = "https://cloud.google.com/compute/docs/reference/rest/v1/"
	migs       = reference + "instanceGroupManagers/"
	apiQuota   = "https://cloud.google.com/compute/api-quota"
	working    = "https://cloud.google.com/compute/docs/instance-groups/working-with-managed-instances"
	repairing  = migs + "insert"
	responses  = "https://cloud.google.com/compute/docs/api/how-tos/api-requests-responses"
	resources  = "https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation"
	errorCodes = reference + "errors"
	balancers  = "https://cloud.google.com/load-balancing/docs/"
)

// Semantics lists the rules that the emulator follows. TestSemantics checks each row.
var Semantics = []Row{
	{"an operation is PENDING, then RUNNING, then DONE", responses},
	{"the operation of a creation is DONE when the machines are scheduled", migs + "createInstances"},
	{"the operation of a deletion is DONE when the deletion is scheduled, and the target size is smaller", migs + "deleteInstances"},
	{"a wait ends with the operation, or after two minutes", reference + "zoneOperations/wait"},
	{"a repeated request ID returns the first operation", migs + "createInstances"},
	{"a request ID is a UUID other than zero", migs + "createInstances"},
	{"a machine is STAGING until it boots, and RUNNING from then on", "https://cloud.google.com/compute/docs/instances/instance-lifecycle"},
	{"a group repeats a failed creation without end, with the errors of the last attempt", migs + "listManagedInstances"},
	{"a zone without machines fails attempts with ZONE_RESOURCE_POOL_EXHAUSTED", resources},
	{"a quota of machines fails attempts with QUOTA_EXCEEDED", resources},
	{"above a rate limit requests fail with 403 rateLimitExceeded until the next minute", apiQuota},
	{"a name that is taken is 409 alreadyExists", errorCodes},
	{"a list has 500 items in a page at most, and a token of the next page", reference + "instances/list"},
	{"managed instances have pages only in groups that are PAGINATED", migs + "listManagedInstances"},
	{"operations are listed with the newest first on request", reference + "zoneOperations/list"},
	{"a deletion of machines that are not members fails, unless they are to be skipped", migs + "deleteInstances"},
	{"a machine that is deleted behind its group is recreated under its name with another number", repairing},
	{"a group that is to do nothing does not recreate a machine", repairing},
	{"a new template applies to new machines only, if updates are OPPORTUNISTIC", working},
	{"a new group makes as many machines as its target size", migs + "insert"},
	{"the operation that deletes a group is DONE when its machines are gone", migs + "delete"},
	{"an object that another one uses is not deleted: 400 resourceInUseByAnotherResource", reference + "networks/delete"},
	{"a reference to an object that does not exist is 400 invalid", reference + "subnetworks/insert"},
	{"ranges of the subnetworks of a network do not overlap", reference + "subnetworks/insert"},
	{"labels of an address are set by setLabels alone, with the fingerprint of the present ones", reference + "addresses/setLabels"},
	{"a machine behind a passthrough load balancer reaches itself at the address of the load balancer", balancers + "network/networklb-backend-service"},
	{"a proxy load balancer connects all clients to healthy machines, from an address of the proxy-only subnetwork", balancers + "proxy-only-subnets"},
	{"a proxy load balancer reaches the port that a group has under the name of the port", balancers + "backend-service"},
	{"named ports of a managed group are set by setNamedPorts, not by its creation", reference + "instanceGroups/setNamedPorts"},
	{"a forwarding rule of a proxy load balancer needs an active proxy-only subnetwork of its network and region", balancers + "proxy-only-subnets"},
	{"a network has one active proxy-only subnetwork in a region, and keeps it while a forwarding rule needs it", balancers + "proxy-only-subnets"},
	{"forwarding rules have one address if their ports differ", reference + "forwardingRules"},
	{"a machine that left its group stays when the group is deleted", migs + "abandonInstances"},
	{"a request without a token for Compute Engine is 401", responses},
	{"the metadata server announces a preemption, and the machine is gone after 30 seconds", "https://cloud.google.com/compute/docs/instances/preemptible"},
	{"the metadata server announces that maintenance terminates or migrates a machine", "https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice"},
	{"a request with wait_for_change is answered when the entry has another version, or after timeout_sec", "https://cloud.google.com/compute/docs/metadata/querying-metadata"},
	{"a missing permission is 403 forbidden with its name", errorCodes},
	{"the answer has the selected fields only, and an unknown field is 400", "https://cloud.google.com/compute/docs/api/how-tos/performance"},
}
