// Package joinproto is the contract between joining machines and the join service.
package joinproto

// ErrorDomain is the domain of google.rpc.ErrorInfo in refusals of tickets.
const ErrorDomain = "constellation.edgeless.systems"

// ReasonReleased is the reason of a refusal of a member: the machine was released from its group. It must reset itself.
const ReasonReleased = "RELEASED"
