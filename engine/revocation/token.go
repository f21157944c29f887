package revocation

import "constellation/engine/kubeadm"

// TokenSecret returns the name of the Secret, in kube-system, of the bootstrap token of a
// node.
func TokenSecret(node string) string { return "bootstrap-token-" + kubeadm.TokenID(node) }
