package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
)

// checks returns all checks in the order in which findings of equal severity are listed.
func checks() []checkItem {
	return slices.Concat(
		clusterChecks, kubeadmChecks, kubeletChecks, actionChecks, apiChecks, webhookChecks, disruptionChecks, rescueChecks, capacityChecks, nodeChecks, actorChecks,
		certificateChecks, addonChecks, accessChecks, admissionChecks, retiredChecks,
	)
}

// answerLimit bounds the first request, which shows whether the API server responds.
const answerLimit = 10 * time.Second

// Run runs the preflight checks for hops on the cluster of config. The first hop is the
// next one; each later hop is checked as if it came next. Run reads the cluster once and
// returns the findings of each hop. Checks whose result is the same for every hop run for
// the first hop only.
//
// emit receives events of the first hop only: one of the kind check for each check before
// the cluster is read, one for each finding when its check ends, and progress events of
// long checks. Calls do not overlap. Findings are sorted by severity, block first, and
// then by check. A check without findings yields one finding with severity Info. The error
// is that of the first request if the API server does not respond, or the context's.
func Run(ctx context.Context, config *rest.Config, hops []check.PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error) {
	return run(ctx, config, hops, emit, nil)
}

// run is Run. collected, unless it is nil, is called with what was read before the checks run.
func run(ctx context.Context, config *rest.Config, hops []check.PreflightRequest, emit func(plan.Event), collected func(kubernetes.Interface, *world)) ([][]plan.Finding, error) {
	config = rest.CopyConfig(config)
	// Reading everything is one burst. API priority and fairness protects other clients.
	config.QPS, config.Burst = 500, 1000
	config.WarningHandler = rest.NoWarnings{} // the checks report deprecated APIs themselves
	core, err := kubernetes.NewForConfig(protobuf(config))
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	if err := answers(ctx, core); err != nil {
		return nil, err
	}
	all := slices.DeleteFunc(checks(), func(c checkItem) bool { return hops[0].NotApplicable[c.id] != "" })
	for _, c := range all {
		emit(plan.Event{Time: time.Now(), Kind: plan.KindCheck, Object: c.id, State: plan.StateRunning, Text: c.title})
	}
	reading := hops[0] // the last target determines what must be read
	for _, r := range hops[1:] {
		if reading.To.Less(r.To) {
			reading.To = r.To
		}
	}
	w, err := collect(ctx, config, core, reading)
	if err != nil {
		return nil, err
	}
	if collected != nil {
		collected(core, w)
	}
	var found [][]plan.Finding
	for _, r := range hops {
		f, err := runChecks(ctx, all, w.under(r), probe{config: config, core: core}, emit)
		if err != nil {
			return nil, err
		}
		found = append(found, f)
		all = slices.DeleteFunc(all, func(c checkItem) bool { return slices.Contains([]string{"health", "certificates", "access"}, c.area) })
		emit = func(plan.Event) {}
	}
	return found, nil
}

// answers returns an error if the API server does not respond.
func answers(ctx context.Context, core kubernetes.Interface) error {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	if _, err := core.Discovery().RESTClient().Get().AbsPath("/version").DoRaw(ctx); err != nil {
		return fmt.Errorf("read version: %w", err)
	}
	return nil
}

// runChecks runs all checks concurrently and returns their findings, sorted. emit
// receives an event for each finding.
func runChecks(ctx context.Context, all []checkItem, w *world, p probe, emit func(plan.Event)) ([]plan.Finding, error) {
	w.made()          // before concurrent checks use it
	var mu sync.Mutex // of emit
	tell := func(e plan.Event) {
		mu.Lock()
		defer mu.Unlock()
		emit(e)
	}
	found := make([][]plan.Finding, len(all))
	var running sync.WaitGroup
	for i, c := range all {
		running.Go(func() {
			start := time.Now()
			p := p
			p.ctx = ctx
			p.progress = func(current, total int64) {
				tell(plan.Event{Time: time.Now(), Kind: plan.KindProgress, Object: c.id, Current: current, Total: total})
			}
			found[i] = c.find(w, &p)
			if ctx.Err() != nil {
				return
			}
			took := time.Since(start)
			for j := range found[i] {
				f := &found[i][j]
				f.Took = took
				data, err := json.Marshal(f)
				if err != nil {
					continue // every field of Finding can be marshalled
				}
				tell(plan.Event{Time: time.Now(), Kind: plan.KindCheck, Object: c.id, State: string(f.Severity), Text: f.Title, Data: data, TookMS: took.Milliseconds()})
			}
		})
	}
	running.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	out := slices.Concat(found...)
	slices.SortStableFunc(out, func(a, b plan.Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return out, nil
}

// find returns the findings of c, at least one.
func (c checkItem) find(w *world, p *probe) []plan.Finding {
	var why []string
	for _, s := range c.needs {
		if reason, ok := w.unread[s]; ok {
			why = append(why, fmt.Sprintf("%s: %s", s, reason))
		}
	}
	var found []plan.Finding
	if len(why) > 0 {
		found = []plan.Finding{{Severity: plan.NotChecked, Title: "not checked whether " + c.title, Detail: strings.Join(why, "; ")}}
	} else {
		found = append(c.run(w, p), c.beyondData(w)...)
	}
	if len(found) == 0 {
		found = []plan.Finding{{Severity: plan.Info, Title: c.title}}
	}
	for i := range found {
		f := &found[i]
		f.ID = cmp.Or(f.ID, c.id)
		f.Severity = cmp.Or(f.Severity, plan.Warn)
		f.Source = cmp.Or(f.Source, c.area)
		f.Reference = cmp.Or(f.Reference, c.ref)
	}
	return found
}

func rank(s plan.Severity) int {
	return slices.Index([]plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}, s)
}

// maxPrintable bounds a quoted value, in runes.
const maxPrintable = 300

// printable returns untrusted text s in a form that is safe for a terminal. It escapes
// control characters, invalid UTF-8, invisible letters, bidirectional controls and stacked
// combining marks as in a Go string, and cuts text after 300 runes.
func printable(s string) string {
	var b strings.Builder
	var f engine.TextFilter
	n := 0
	for i, size := 0, 0; i < len(s); i += size {
		if n++; n > maxPrintable {
			b.WriteString("...")
			break
		}
		var r rune
		r, size = utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case f.Shows(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
	}
	return b.String()
}
