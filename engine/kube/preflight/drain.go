package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/plan"
)

const (
	// maxEvictions bounds the number of dry-run evictions.
	maxEvictions = 300
	// evictionWorkers is the number of concurrent evictions. The API server is the bottleneck:
	// fewer workers leave it idle, more would only queue.
	evictionWorkers = 16
	// rehearsalLimit bounds all requests together: a webhook can take 30 s for each.
	rehearsalLimit = 12 * time.Second
	// maxStrikes is the number of timeouts and failed webhook calls after which the dry run
	// stops.
	maxStrikes = 3
	// maxBusy is the number of retries of a request that an overloaded API server rejected.
	maxBusy = 5
)

// verdict is the API server's decision on the eviction of a pod.
type verdict int

const (
	notAsked  verdict = iota
	late              // no response in time
	evictable         // allowed
	gone              // deleted meanwhile
	noRoom            // its budget allows no disruption
	overlap           // it has two budgets
	denied            // a webhook or an admission policy denies it
	refused           // something else
	noDryRun          // a webhook has side effects and supports no dry run
	forbidden         // the user may not create evictions
	ending            // its namespace is being deleted
)

// answer is a verdict and its reason, in the API server's words.
type answer struct {
	verdict verdict
	text    string
	by      string // the webhook or policy that denies
	took    time.Duration
}

// uncalled reports whether a webhook denies because it cannot be called.
func (a answer) uncalled() bool {
	return a.verdict == denied && strings.Contains(a.text, "failed calling webhook")
}

// rehearse requests all evictions as dry runs. Then it simulates the drains one after the
// other, because dry runs do not use up budgets.
func rehearse(w *world, p *probe) []plan.Finding {
	l := w.lookup()
	if len(l.moving) == 0 {
		return nil
	}
	answers := map[*pod]answer{}
	var stopped string
	var err error
	if w.request.DryRun {
		answers, stopped, err = ask(p, w.rehearsed())
	}
	tally := map[verdict]int{}
	for _, a := range answers {
		tally[a.verdict]++
	}
	asked := len(answers) - tally[forbidden] - tally[noDryRun] - tally[notAsked] - tally[late]
	basis := fmt.Sprintf("tested by dry run: %d of %s", asked, count(len(l.moving), "eviction"))
	if rest := len(l.moving) - asked; rest > 0 {
		basis += fmt.Sprintf("; the other %d computed from the status of PodDisruptionBudgets", rest)
		if stopped != "" {
			basis += ", because " + stopped
		}
	}
	switch {
	case w.request.DryRun && asked == 0 && stopped != "":
		basis = "computed from the status of PodDisruptionBudgets alone, because " + stopped
	case w.request.DryRun && asked == 0:
		basis = "computed from the status of PodDisruptionBudgets alone"
	case !w.request.DryRun:
		basis = "computed from the status of PodDisruptionBudgets alone: dry-run requests are disabled, so no webhook was called"
	}

	found := w.denials(answers, p, basis)
	slow, isSlow := w.slowHooks(answers, p, basis)
	if isSlow {
		found = append(found, slow)
	}
	if h, ok := w.follow(answers); ok {
		found = append(found, w.hanging(h, answers, basis))
	}
	switch {
	case err != nil:
		found = append(found, plan.Finding{
			Severity: plan.NotChecked, Title: "not checked whether evictions are allowed: no request could be made", Detail: printable(plain(err).Error()) + "; " + basis,
		})
	case tally[forbidden] > 0:
		found = append(found, plan.Finding{
			Severity: plan.NotChecked, Title: "not checked whether evictions are allowed: the kubeconfig's user may not create them", Detail: basis,
			Remedy: "use a kubeconfig that may create pods/eviction",
		})
	case tally[notAsked] > 0, tally[late] > 0 && !isSlow:
		found = append(found, plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether %s would be allowed: the API server did not respond", count(tally[notAsked]+tally[late], "eviction")), Detail: basis,
		})
	case len(found) == 0 && asked < len(l.moving):
		found = append(found, plan.Finding{Severity: plan.Info, Title: "every node that is replaced can be drained", Detail: basis})
	}
	return found
}

// rehearsed are the pods to evict as a dry run: those with a budget, and one of each other
// workload. If they are too many, one of every budget and workload comes first.
func (w *world) rehearsed() []*pod {
	l := w.lookup()
	var early, late []*pod
	seen := map[any]bool{}
	for _, p := range l.moving {
		covering := l.covering[p]
		var key any = w.workload(p)
		if len(covering) > 0 {
			key = covering[0]
		}
		switch {
		case !seen[key]:
			seen[key] = true
			early = append(early, p)
		case len(covering) > 0:
			late = append(late, p)
		}
	}
	chosen := append(early, late...)
	return chosen[:min(len(chosen), maxEvictions)]
}

// within is the total time of one check's dry runs.
func (p *probe) within() time.Duration { return cmp.Or(p.limit, rehearsalLimit) }

// slow is the duration of one dry run from which slow evictions are reported.
func (p *probe) slow() time.Duration { return p.within() / 4 }

// ask evicts pods as a dry run. If responses time out, it stops and returns why; some pods
// then have no answer. The error is about the client.
func ask(p *probe, pods []*pod) (answers map[*pod]answer, stopped string, err error) {
	config := rest.CopyConfig(p.config)
	config.QPS = -1 // API priority and fairness is the limit
	config.ContentType, config.AcceptContentTypes = "application/json", "application/json"
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, "", fmt.Errorf("make Kubernetes client: %w", err)
	}
	ctx, cancel := context.WithTimeout(p.ctx, p.within())
	defer cancel()
	answers = make(map[*pod]answer, len(pods))
	var (
		mu      sync.Mutex // of answers, stopped and strikes
		strikes = map[string]int{}
		next    = make(chan *pod)
		workers sync.WaitGroup
	)
	for range min(evictionWorkers, len(pods)) {
		workers.Go(func() {
			for pod := range next {
				start := time.Now()
				a := askOne(ctx, core.PolicyV1().RESTClient(), pod)
				a.took = time.Since(start)
				mu.Lock()
				switch ended := ctx.Err(); {
				case a.verdict != notAsked || ended == nil:
				case errors.Is(ended, context.DeadlineExceeded):
					a.verdict = late
					stopped = fmt.Sprintf("no answer came within %s", plainDuration(p.within()))
				default: // another worker stopped the run
					mu.Unlock()
					continue
				}
				answers[pod] = a
				if a.uncalled() {
					if strikes[a.by]++; strikes[a.by] >= maxStrikes && stopped == "" {
						stopped = fmt.Sprintf("%s failed %d times", a.by, maxStrikes)
						cancel()
					}
				}
				if n := len(answers); n%20 == 0 || n == len(pods) {
					p.progress(int64(n), int64(len(pods)))
				}
				mu.Unlock()
			}
		})
	}
	for _, pod := range pods {
		select {
		case next <- pod:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	workers.Wait()
	return answers, stopped, nil
}

func askOne(ctx context.Context, client rest.Interface, p *pod) answer {
	for attempt := 1; ; attempt++ {
		err := evict(ctx, client, p)
		wait, busy := apierrors.SuggestsClientDelay(err)
		a := classify(err)
		if a.verdict != notAsked || !busy || attempt == maxBusy {
			return a
		}
		select {
		case <-time.After(time.Duration(max(wait, 1)) * time.Second):
		case <-ctx.Done():
			return a
		}
	}
}

// evict evicts p as a dry run. The dry run is set twice: admission reads the request's
// option, the eviction handler that in its body.
func evict(ctx context.Context, client rest.Interface, p *pod) error {
	o := &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}
	if p.uid != "" {
		o.Preconditions = &metav1.Preconditions{UID: &p.uid}
	}
	answer := client.Post().AbsPath("/api/v1").Namespace(p.namespace).Resource("pods").Name(p.name).SubResource("eviction").
		Param("dryRun", metav1.DryRunAll).MaxRetries(0).
		Body(&policyv1.Eviction{
			TypeMeta:      metav1.TypeMeta{APIVersion: policyv1.SchemeGroupVersion.String(), Kind: "Eviction"},
			ObjectMeta:    metav1.ObjectMeta{Namespace: p.namespace, Name: p.name},
			DeleteOptions: o,
		}).Do(ctx)
	if err := answer.Error(); err != nil {
		return err
	}
	body, err := answer.Raw()
	if err != nil {
		return err
	}
	// A pod with two budgets yields a failure in a response with a success code.
	var status metav1.Status
	if err := json.Unmarshal(body, &status); err == nil && status.Kind == "Status" && status.Status == metav1.StatusFailure {
		return &apierrors.StatusError{ErrStatus: status}
	}
	return nil
}

// denier extracts the denying webhook or policy from an admission message.
var denier = regexp.MustCompile(`(?:admission|failed calling) webhook "([^"]*)"|(ValidatingAdmissionPolicy '[^']*')`)

// classify converts the error of an eviction to a verdict.
func classify(err error) answer {
	if err == nil {
		return answer{verdict: evictable}
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return answer{verdict: notAsked, text: printable(plain(err).Error())}
	}
	s := status.Status()
	a := answer{verdict: refused, text: printable(s.Message)}
	if m := denier.FindStringSubmatch(s.Message); m != nil {
		a.verdict, a.by = denied, printable(cmp.Or(m[2], "webhook "+m[1]))
		if strings.Contains(s.Message, "does not support dry run") {
			a.verdict = noDryRun
		}
		return a
	}
	switch {
	case s.Reason == metav1.StatusReasonTooManyRequests || s.Code == 429:
		a.verdict = notAsked
		if s.Details == nil {
			break
		}
		for _, c := range s.Details.Causes {
			if c.Type == policyv1.DisruptionBudgetCause {
				a.verdict, a.text = noRoom, printable(c.Message)
			}
		}
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		a.verdict = ending
	case apierrors.IsForbidden(err) && strings.Contains(s.Message, "disruptions allowed is negative"):
		a.verdict = noRoom
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		a.verdict = gone
	case strings.Contains(s.Message, "more than one PodDisruptionBudget"):
		a.verdict = overlap
	case apierrors.IsForbidden(err) && strings.Contains(s.Message, "pods/eviction"), apierrors.IsUnauthorized(err):
		a.verdict = forbidden
	}
	return a
}

// denials reports evictions that are rejected for another reason than a budget.
func (w *world) denials(answers map[*pod]answer, p *probe, basis string) []plan.Finding {
	groups := map[string][]*pod{}
	for x, a := range answers {
		switch a.verdict {
		case denied:
			groups[a.by] = append(groups[a.by], x)
		case refused:
			groups[""] = append(groups[""], x)
		}
	}
	var found []plan.Finding
	for _, by := range sortedKeys(groups) {
		pods := w.inOrder(groups[by])
		node := pods[0].node
		f := plan.Finding{
			Severity: plan.Block,
			Title:    fmt.Sprintf("%s denies the eviction of %s", by, count(len(pods), "pod")),
			Detail:   fmt.Sprintf("%s: %s; the first on %s (%s); %s", printable(pods[0].namespace+"/"+pods[0].name), answers[pods[0]].text, printable(node), w.lookup().position(node), basis),
			Owner:    w.keepers(pods), Objects: objects(pods), Remedy: "follow the message, or remove the rule during the rollout",
		}
		if by == "" {
			f.Title = fmt.Sprintf("the API server rejects the eviction of %s", count(len(pods), "pod"))
			f.Remedy = "follow the message"
		}
		for _, h := range w.hooks() {
			if by != h.title() {
				continue
			}
			f.Owner = keeperOf(h.config)
			f.Objects = append([]string{h.object()}, f.Objects...)
			if a := answers[pods[0]]; a.uncalled() {
				f.Remedy = "restore its backend; or set failurePolicy to Ignore, which its owner may revert"
				f.Command = h.ignore()
				if a.took > p.slow() {
					f.Command = h.ignoreSoon()
				}
				if w.unread[sourceServices] == "" && w.unread[sourceSlices] == "" {
					f.Detail += follows(webhookEndpoints(w, nil), "webhook-endpoints", h.object())
				}
				continue
			}
			var namespaces []string
			for _, p := range pods {
				namespaces = append(namespaces, p.namespace)
			}
			f.Remedy = "follow the message; or exempt these namespaces, which its owner may revert"
			f.Command = h.exempt(first(namespaces))
		}
		found = append(found, f)
	}
	return fold(found, "rules that deny evictions")
}

// slowHooks reports the webhooks that may cause slow evictions, if every eviction is slow.
func (w *world) slowHooks(answers map[*pod]answer, p *probe, basis string) (plan.Finding, bool) {
	var took []time.Duration
	var pods []*pod
	lates, spoilt := 0, 0
	for x, a := range answers {
		switch {
		case a.verdict == late:
			lates++
		case a.verdict == notAsked, a.verdict == forbidden, a.verdict == noDryRun, a.verdict == gone:
			continue
		case a.took <= p.slow():
			return plan.Finding{}, false
		case a.uncalled():
			spoilt++ // reported as a denial
		}
		took = append(took, a.took)
		pods = append(pods, x)
	}
	if len(took) == 0 || spoilt == len(took) {
		return plan.Finding{}, false
	}
	pods = w.inOrder(pods)
	slices.Sort(took)
	each := took[len(took)/2]
	strict, lenient := w.judging(pods, each)
	hooks := slices.Concat(strict, lenient)
	if len(hooks) == 0 {
		return plan.Finding{}, false
	}
	names := make([]string, len(hooks))
	f := plan.Finding{Severity: plan.Warn, Owner: keeperOf(hooks[0].config)}
	for i, h := range hooks {
		names[i] = h.name
		f.Objects = append(f.Objects, h.object())
		if keeperOf(h.config) != f.Owner {
			f.Owner = ""
		}
	}
	who := hooks[0].title()
	if len(hooks) > 1 {
		who = "one of webhooks " + enumerate(names, 3)
	}
	moving := len(w.lookup().moving)
	total := plainDuration(each * time.Duration(moving))
	f.Detail = fmt.Sprintf("the first is %s on %s (%s); %s", printable(pods[0].namespace+"/"+pods[0].name), printable(pods[0].node), w.lookup().position(pods[0].node), basis)
	f.Objects = append(f.Objects, objects(pods)...)
	f.Remedy = "check its backend"
	one := len(hooks) == 1
	switch {
	case lates == 0:
		f.Title = fmt.Sprintf("%s is slow for evictions: %s each, the drain of %s would take %s one after the other", who, plainDuration(each), count(moving, "pod"), total)
	case len(strict) > 0:
		f.Severity = plan.Block
		f.Title = fmt.Sprintf("%s responds to no eviction within %s, and its failurePolicy is Fail", who, plainDuration(p.within()))
		f.Remedy += "; or set a timeout of 1 s with failurePolicy Ignore, which its owner may revert"
		if one {
			f.Command = strict[0].ignoreSoon()
		}
		if slices.ContainsFunc(strict, func(h *hook) bool { return h.conditions }) {
			f.Severity = plan.Warn
			f.Detail += "; its matchConditions may exclude evictions, and were not evaluated"
		}
	default:
		f.Title = fmt.Sprintf("%s is slow for evictions: more than %s each, the drain of %s would take more than %s one after the other", who, plainDuration(p.within()), count(moving, "pod"), total)
	}
	if len(strict) == 0 {
		f.Remedy += "; or set its timeout to 1 s: its failurePolicy is Ignore, and its owner may revert that"
		if one {
			f.Command = lenient[0].patch("timeoutSeconds", 1)
		}
	}
	return f, true
}

// judging are the webhooks that review the evictions of pods and have at least that timeout;
// all that review them if none has.
func (w *world) judging(pods []*pod, took time.Duration) (strict, lenient []*hook) {
	find := func(hooks []*hook, took time.Duration) (out []*hook) {
		for _, h := range hooks {
			judges := slices.Contains(h.hits, evictions) && slices.ContainsFunc(pods, func(p *pod) bool {
				return h.namespaces.Matches(w.namespaceLabels(p.namespace))
			})
			// A response takes a little longer than the webhook's timeout.
			if judges && time.Duration(h.timeout+1)*time.Second >= took {
				out = append(out, h)
			}
		}
		return out
	}
	for _, took := range []time.Duration{took, 0} {
		if strict, lenient = find(w.hooks(), took), find(w.lenientHooks(), took); len(strict)+len(lenient) > 0 {
			break
		}
	}
	return strict, lenient
}

// inOrder sorts pods in the order of the drains.
func (w *world) inOrder(pods []*pod) []*pod {
	l := w.lookup()
	slices.SortFunc(pods, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(l.place[a.node], l.place[b.node]), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	return pods
}

// hang is the first pod that blocks a drain.
type hang struct {
	pod    *pod
	why    string
	object string
	// keeper and command belong to the blocking object.
	keeper, command string
	remedy          string // of what passes
	follows         string // ends the detail; see follows
	// passes reports whether it resolves itself once pods are healthy.
	passes bool
}

// follower is the state of simulated drains.
type follower struct {
	*world
	answers map[*pod]answer
	left    map[*budget]int32
	spent   map[*budget][]string // pods that are not recreated, with the reason
	without map[*budget]hang     // budgets without allowed disruptions from the start
}

// follow simulates draining node after node. A recreated pod restores its budget's allowed
// disruptions; a pod that cannot be recreated does not. Concurrent drains wait for each
// other's pods, which changes how long they take, not whether they end.
func (w *world) follow(answers map[*pod]answer) (hang, bool) {
	l := w.lookup()
	s := &follower{w, answers, map[*budget]int32{}, map[*budget][]string{}, map[*budget]hang{}}
	for _, b := range l.budgets {
		s.left[b] = b.Status.DisruptionsAllowed
	}
	var passing *hang
	for _, p := range l.moving {
		h, ok := s.holds(p)
		switch {
		case !ok:
		case !h.passes:
			return h, true
		case passing == nil:
			passing = &h
		}
	}
	if passing != nil {
		return *passing, true
	}
	return hang{}, false
}

// holds reports whether the drain waits for p, and uses up budgets.
func (s *follower) holds(p *pod) (hang, bool) {
	covering, a := s.lookup().covering[p], s.answers[p]
	switch {
	case a.verdict == denied:
		return hang{pod: p, why: a.by + " denies it: " + a.text, object: p.object(), keeper: s.keeper(p), follows: "; caused by the denial by " + a.by}, true
	case a.verdict == refused:
		return hang{pod: p, why: "the API server rejects it: " + a.text, object: p.object(), keeper: s.keeper(p)}, true
	case a.verdict == ending, s.namespaces[p.namespace].DeletionTimestamp != nil:
		return hang{
			pod: p, why: "namespace " + printable(p.namespace) + " is being deleted and accepts no evictions", object: object("namespace", "", p.namespace),
			remedy: "run the check again in a minute: its pods are deleted with it", passes: true,
		}, true
	case a.verdict == gone, p.needless(), len(covering) == 0:
		return hang{}, false
	case len(covering) > 1:
		b := youngest(covering)
		return hang{pod: p, why: "it has more than one PodDisruptionBudget: " + budgetNames(covering), object: b.object(), keeper: keeperOf(&b.ObjectMeta), command: b.remove(), follows: "; caused by pdb-overlap"}, true
	}
	b := covering[0]
	if !b.spends(p) {
		return hang{}, false
	}
	if s.left[b] > 0 && !b.stale() {
		if why := s.absent(p); why != "" {
			s.left[b]--
			s.spent[b] = append(s.spent[b], p.name+" ("+why+")")
		}
		return hang{}, false
	}
	if h, ok := s.without[b]; ok {
		h.pod = p
		return h, true
	}
	h := hang{pod: p, object: b.object(), keeper: keeperOf(&b.ObjectMeta)}
	if spent := s.spent[b]; len(spent) > 0 {
		h.why = fmt.Sprintf("PodDisruptionBudget %s allows no further disruption: pods evicted before are not recreated: %s", b.name(), enumerate(spent, 3))
		h.command = s.allowLost(b)
		return h, true
	}
	switch f, known := s.roomOf(b); {
	case known:
		h.follows = "; caused by pdb-room"
		h.why, h.command, h.remedy, h.passes = f.Title, f.Command, f.Remedy, f.Severity != plan.Block
	default:
		h.why, h.passes = "PodDisruptionBudget "+b.name()+" allows no disruption", true
	}
	s.without[b] = h
	return h, true
}

// allowLost is the command that makes b tolerate the pods that are not recreated.
func (w *world) allowLost(b *budget) string {
	n := 0
	for _, p := range b.moving {
		if w.absent(p) != "" {
			n++
		}
	}
	if b.Spec.MaxUnavailable != nil {
		return b.patch(fmt.Sprintf(`"maxUnavailable":%d`, n))
	}
	return b.patch(fmt.Sprintf(`"minAvailable":%d`, max(b.expected()-n, 0)))
}

// absent returns why p is not recreated after its eviction, or does not start; empty if it
// is.
func (w *world) absent(p *pod) string {
	if p.controller.kind == "" {
		return "it has no controller"
	}
	for _, v := range w.localVolumes(p) {
		if v.pinned {
			return "its volume is bound to " + printable(p.node)
		}
	}
	return w.placed().lost[p]
}

func (w *world) hanging(h hang, answers map[*pod]answer, basis string) plan.Finding {
	held := 0
	for _, a := range answers {
		if a.verdict == noRoom || a.verdict == overlap || a.verdict == denied || a.verdict == refused {
			held++
		}
	}
	name := printable(h.pod.namespace + "/" + h.pod.name)
	f := plan.Finding{
		Severity: plan.Block, Owner: h.keeper, Command: h.command,
		Title:  fmt.Sprintf("the drain of %s (%s) would be the first to hang, at pod %s", printable(h.pod.node), w.lookup().position(h.pod.node), name),
		Detail: h.why + "; " + basis,
		Remedy: "resolve this and run the check again: later drains were not simulated",
	}
	// Other rejected pods are not among the objects, so the objects are the same for dry runs
	// and computed results.
	for _, o := range []string{object("node", "", h.pod.node), h.pod.object(), h.object} {
		if !slices.Contains(f.Objects, o) {
			f.Objects = append(f.Objects, o)
		}
	}
	if h.passes {
		f.Severity = plan.Warn
		f.Title = fmt.Sprintf("the drain of %s (%s) would be the first to wait, for pod %s", printable(h.pod.node), w.lookup().position(h.pod.node), name)
		f.Remedy = cmp.Or(h.remedy, "wait until the pods are ready and run the check again")
	}
	if a := answers[h.pod]; a.verdict == noRoom || a.verdict == overlap {
		f.Detail = h.why + "; the API server reports: " + strings.TrimSuffix(a.text, ".") + "; " + basis
	}
	if held > 1 {
		f.Detail += fmt.Sprintf("; %s rejected", count(held, "eviction"))
	}
	f.Detail += h.follows
	return f
}
