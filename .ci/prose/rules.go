package main

import "regexp"

// A rule bans a term or a construction.
type rule struct {
	name    string // as allow.txt calls it
	pattern string // regular expression, case-insensitive
	instead string // remedy
	// opening restricts the rule to the beginning of sentences that are no questions.
	opening bool

	match, pass string // a sentence that the rule must report, and one that it must not
}

// machinery names programs and machines, for rules against personification.
const machinery = `(operator|machine|agent|server|cloud|node|kubelet|console|engine|daemon|service|cluster|member|leader|bootstrapper|program|controller|process|kernel|registry|store|validator|client)`

// rules is the table of what is banned. Home-made terms come first, then constructions.
var rules = []rule{
	// Home-made terms.
	{name: "wish", pattern: `\bwish(es|ed)?\b`, instead: "retry request", match: "A wish is one try.", pass: "A retry request permits one retry."},
	{name: "heir", pattern: `\bheirs?\b`, instead: "replacement node", match: "The heir is Ready.", pass: "The key constellation/heir is inherited."},
	{name: "donor", pattern: `\bdonors?\b`, instead: "old node", match: "The donor is cordoned.", pass: "The old node is cordoned, see spec.donor."},
	{name: "strays", pattern: `\bstrays\b`, instead: "orphaned machines, orphans", match: "The operator removes strays.", pass: "A stray file is refused."},
	{name: "lookout", pattern: `\blookouts?\b`, instead: "API health monitor", match: "The lookout polls the API.", pass: "Look out for typing errors."},
	{name: "mood", pattern: `\bmoods?\b`, instead: "state", match: "It is the mood of a TPM.", pass: "The state of a TPM."},
	{name: "temper", pattern: `\btempers?\b`, instead: "state", match: "The temper changes.", pass: "The temperature changes."},
	{name: "speller", pattern: `\bspellers?\b`, instead: "command formatter", match: "A speller writes commands.", pass: "A misspelled name."},
	{name: "lineup", pattern: `\blineups?\b`, instead: "node diff", match: "The lineup has 3 nodes.", pass: "Nodes line up."},
	{name: "sighting", pattern: `\bsightings?\b`, instead: "first-seen time", match: "Each sighting is recorded.", pass: "The first-seen time is recorded."},
	{name: "efforts", pattern: `\befforts\b`, instead: "retries, backoff", match: "Failed efforts pause.", pass: "A best-effort write."},
	{name: "affliction", pattern: `\bafflict(ion|ions|s|ed|ing)?\b`, instead: "fault", match: "An affliction of a machine.", pass: "A conflict of versions."},
	{name: "crew", pattern: `\bcrews?\b`, instead: "workers, worker pool", match: "The crew writes objects.", pass: "A screwdriver."},
	{name: "sheet", pattern: `\bsheets?\b`, instead: "renderer", match: "The sheet draws tables.", pass: "A spreadsheet."},
	{name: "bad luck", pattern: `\b(bad luck|unlucky)\b`, instead: "injected faults", match: "Rollouts with bad luck.", pass: "Rollouts with injected faults."},
	{name: "truth", pattern: `\bthe truth\b`, instead: "the observed state", match: "The cluster is the truth.", pass: "The cluster is the only source of truth."},
	{name: "hop before", pattern: `\bhops? before\b`, instead: "previous hop", match: "It needs the hop before.", pass: "Every hop has a check beforehand."},
	{name: "what goes together", pattern: `\b(what|which) (goes|go|fits?) together\b`, instead: "compatibility matrix, compatible", match: "It lists what goes together.", pass: "Put these together."},
	{name: "gone to", pattern: `\b(is|are|be|been|was|were) gone to\b`, instead: "upgrade target, reachable version", match: "A version that can be gone to.", pass: "The machine has gone to sleep."},
	{name: "let go", pattern: `\b(let|lets|letting) ((it|them|him|a|the|every|each|node|nodes|people|one) ){0,2}go\b`, instead: "release, resume or delete (say which)", match: "It lets a node go.", pass: "Do not let it grow."},
	{name: "held node", pattern: `\bheld (back )?(node|nodes|group|groups|machine|machines)\b`, instead: "skipped, on hold", match: "Only held nodes are left.", pass: "The lock is held by another process."},
	{name: "place", pattern: `\b(holds?|frees?|keeps?|free) (a|the|one|its|their|no) places?\b|\bsurge places?\b|\bplaces? of the (surge )?budget\b`, instead: "surge slot", match: "It holds a place.", pass: "Another machine takes its place."},
	{name: "look", pattern: `\b(one|each|every|the first|the last|the next|second) look( at\b|[,.;:)]| (later|before|after|until)\b)|\btwo looks\b`, instead: "observation, poll, reconcile, list", match: "Between two looks at the cloud.", pass: "Each look-up is cached, and one looks like the other."},
	{name: "word", pattern: `\b(says?|writes?|sends?|waits? for) (a|any|the|his|its|one|no) words?\b`, instead: "acknowledge", match: "It waits for a word.", pass: "Every word is counted."},

	// Riddles: sentences that hide their subject.
	{name: "Who", opening: true, pattern: `^who(ever|m|se)? [a-z]`, instead: "name the subject", match: "Who is frozen receives nothing.", pass: "Who issues tickets?"},
	{name: "What", opening: true, pattern: `^what(ever)? (is|are|was|were|has|have|had|can|cannot|may|must|comes|goes|runs|fails|stands|no|nobody|a|an|does|leaves|lies|moves|turns|callers|becomes)\b`, instead: "name the subject", match: "What is not done is tried again.", pass: "What is a surge?"},
	{name: "whoever", pattern: `\bwho(so|m)?ever\b`, instead: "name the subject", match: "It is open to whoever asks.", pass: "However, it is open."},
	{name: "what is …", pattern: `\bwhat (is|was|are|were) (not|there|gone|done|told|asked|said|known|begun|bound|made|to be|held|nothing|already|still|looked|meant to|being)\b`, instead: "name the thing", match: "It repeats what is not done.", pass: "Nobody asked what happened."},
	{name: "nobody …", pattern: `\bnobody (else )?(is|was|can|could|may|might|must|will|would|has|had|knows|knew|holds|held|asks|asked|looks|tells|told|waits|says|said|leads|reads|sees|wants|follows|watches|does|did|gives|gave|tracks|keeps|takes|hears|sets|writes|uses|needs|listens|answers)\b`, instead: "name the subject, or use the passive", match: "Nobody holds it for long.", pass: "The process runs as user nobody."},
	{name: "that there is", pattern: `\b(those|ones|all|everything|one|node|nodes|machine|machines|cluster|faults?) that there (is|are|was|were)\b|\bthere (is|are) to be\b`, instead: "existing, available", match: "It lists those that there are.", pass: "It reports that there are none."},
	{name: "is none", pattern: `\b(that|which) (is|are|was|were) none\b`, instead: "is not a …, has no …", match: "A machine that is none.", pass: "It returns nil if there is none."},

	// Personification.
	{name: "is told", pattern: `\b(is|are|was|were|be|been|being|as) told\b`, instead: "is reported, is shown, receives", match: "The user is told so.", pass: "The thresholds are toldable."},
	{name: "tells …", pattern: `\btells (of|that|which|what|whether|how|why|who|when|the|a|it|us|people|apart|them)\b`, instead: "reports, shows, lists, explains", match: "It tells which upgrades exist.", pass: "It cannot tell whether the write arrived."},
	{name: "its turn", pattern: `\b(its|their|whose|a control plane's|his|your) turns?\b`, instead: "say what happens: is retried, may join, starts", match: "The node has its turn.", pass: "The function returns, and in turn its caller."},
	{name: "gets on", pattern: `\b(get|gets|got|getting) on( by (itself|themselves)|[,;.]| (and|until|or|if|to|then)\b|$)`, instead: "progresses, makes progress", match: "The node gets on by itself.", pass: "It targets one node."},
	{name: "machine says", pattern: `\b` + machinery + ` (says|knows|believes|thinks|wants|hears|forgets|speaks|minds|likes|dares|wishes)\b`, instead: "reports, returns, logs, requires, stores", match: "The operator knows its nodes.", pass: "The operator reports its nodes."},
	{name: "find each other", pattern: `\bfinds? (each other|one another) again\b`, instead: "the partition heals", match: "They find each other again.", pass: "The nodes find each other by DNS."},
	{name: "trip over", pattern: `\b(trip|trips|tripped|stumble|stumbles) over\b`, instead: "fail because of", match: "A hop would trip over it.", pass: "A round trip overall."},

	// Archaic forms.
	{name: "shall", pattern: `\bshall\b`, instead: "must, will", match: "It shall run.", pass: "A shallow copy."},
	{name: "anew", pattern: `\banew\b`, instead: "again, from scratch", match: "It starts anew.", pass: "It starts again."},
	{name: "for ever", pattern: `\bfor ever\b`, instead: "indefinitely, until …", match: "It waits for ever.", pass: "It waits for every node."},
	{name: "no more than this", pattern: `\b(is|are) to be no (more|fewer|less)\b`, instead: "must not exceed, at most", match: "There are to be no more machines.", pass: "There are no more machines."},
}

// compiled has the patterns of rules, in their order.
var compiled = func() []*regexp.Regexp {
	all := make([]*regexp.Regexp, len(rules))
	for i, r := range rules {
		all[i] = regexp.MustCompile(`(?i)` + r.pattern)
	}
	return all
}()

// verbs are the words with which short help may begin. Add a verb here when a command needs it.
var verbs = map[string]bool{}

func init() {
	for _, v := range []string{
		"Abandon", "Accept", "Add", "Apply", "Approve", "Archive", "Attach", "Back", "Begin", "Bootstrap", "Bring", "Build", "Bundle", "Cancel", "Change", "Check", "Collect",
		"Clear", "Compare", "Configure", "Convert", "Copy", "Create", "Cut", "Delete", "Describe", "Diagnose", "Diff", "Disable", "Download", "Drain",
		"Edit", "Enable", "End", "Exclude", "Execute", "Export", "Fetch", "Follow", "Format", "Generate", "Get", "Import", "Init", "Initialize", "Inject", "Inspect",
		"Install", "Join", "Keep", "Leave", "List", "Make", "Manage", "Measure", "Merge", "Migrate", "Move", "Open", "Operate", "Pack", "Pause", "Plan", "Play", "Postpone", "Power",
		"Prepare", "Print", "Prune", "Publish", "Pull", "Push", "Query", "Read", "Reboot", "Record", "Release", "Remove", "Rename", "Render", "Repair",
		"Replace", "Replay", "Report", "Reset", "Restart", "Restore", "Resume", "Retry", "Revoke", "Roll", "Rotate", "Run", "Save", "Send", "Serve",
		"Set", "Show", "Shut", "Sign", "Simulate", "Skip", "Start", "Stop", "Switch", "Sync", "Take", "Test", "Uninstall", "Update", "Upgrade", "Upload",
		"Validate", "Verify", "Wait", "Watch", "Write",
	} {
		verbs[v] = true
	}
}

// Limits of length.
const (
	maxSentence = 25 // words of a sentence in a Markdown page
	maxShort    = 60 // characters of a command's short help
	maxColumns  = 2  // fields of a test table's row without names: an input and what it must give
)

// maxWords has the limits of pages that are read as a whole, as `wc -w` counts, tables included.
var maxWords = map[string]int{"ARCHITECTURE.md": 3000}
