package kube

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"constellation/engine/cloud/providers"
)

// groupNames are the names of scaling groups by the lower case of their ID, for clouds whose IDs
// contain no names. Nodes and PendingNodes have the ID alone.
type groupNames struct {
	mu   sync.Mutex
	byID map[string]string
	read time.Time
}

// groupsAge is how old the names are at least when an unknown ID has them read again.
const groupsAge = 5 * time.Second

// groupName returns the name of a group: what its ID contains in its cloud, or else what a
// ScalingGroup has. It returns the ID while neither has a name. It reads ScalingGroups only for an ID
// that is not known yet.
func (c *Client) groupName(ctx context.Context, id string) string {
	if id == "" {
		return ""
	}
	if name := providers.GroupName(id); name != "" {
		return name
	}
	g, key := &c.groups, strings.ToLower(id) // the case does not count in IDs
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.byID[key] == "" && time.Since(g.read) > groupsAge {
		var l *unstructured.UnstructuredList
		err := retry(ctx, func(ctx context.Context) (err error) {
			l, err = c.dynamic.Resource(scalingGroups).List(ctx, metav1.ListOptions{})
			return err
		})
		if g.read = time.Now(); err != nil {
			c.log.Debug("scaling groups not listed", "err", err)
			return id
		}
		g.byID = make(map[string]string, len(l.Items))
		for i := range l.Items {
			id, name := groupOf(&l.Items[i])
			g.byID[strings.ToLower(id)] = name
		}
	}
	return cmp.Or(g.byID[key], id)
}

// groupOf returns the ID of a ScalingGroup and its name in the configuration.
func groupOf(g *unstructured.Unstructured) (id, name string) {
	id, _, _ = unstructured.NestedString(g.Object, "spec", "groupId")
	name, _, _ = unstructured.NestedString(g.Object, "spec", "nodeGroupName")
	return id, name
}
