// Statistics of turns: totals, and series over time.

/** Return the median of numbers, or null. */
export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Return the value below which a share of the numbers lie, or null. */
export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function firstTokenOf(turn) {
  return turn.times?.first_token_s ?? null;
}

/** Summarise the turns that ended since a time. */
export function figures(turns, sinceS) {
  const found = { turns: 0, prompt: 0, cached: 0, tokensPerS: 0, firstTokenS: null };
  const firsts = [];
  let completed = 0;
  let first = Infinity;
  for (let i = turns.length - 1; i >= 0 && turns[i].at_s >= sinceS; i -= 1) {
    const turn = turns[i];
    found.turns += 1;
    found.prompt += turn.prompt_tokens ?? 0;
    found.cached += turn.cached_tokens ?? 0;
    completed += turn.completion_tokens ?? 0;
    first = Math.min(first, turn.at_s - (turn.seconds ?? 0));
    if (firstTokenOf(turn) !== null) firsts.push(firstTokenOf(turn));
  }
  const span = found.turns ? Math.max(1, turns.at(-1).at_s - first) : 1;
  found.tokensPerS = completed / span;
  found.firstTokenS = median(firsts);
  return found;
}

/** Return series in `count` steps of `stepS` that end at `endS`: one array of times, and one of
 * values for each name. */
export function series(turns, samples, endS, stepS, count) {
  const end = Math.ceil(endS / stepS) * stepS;
  const begin = end - stepS * count;
  const steps = Array.from({ length: count }, () => ({
    firsts: [], prompt: 0, cached: 0, completed: 0, waiting: null, active: null,
  }));
  const at = (timeS) => steps[Math.floor((timeS - begin) / stepS)];
  for (const turn of turns) {
    const step = at(turn.at_s);
    if (!step) continue;
    if (firstTokenOf(turn) !== null) step.firsts.push(firstTokenOf(turn));
    step.prompt += turn.prompt_tokens ?? 0;
    step.cached += turn.cached_tokens ?? 0;
    step.completed += turn.completion_tokens ?? 0;
  }
  for (const sample of samples) {
    const step = at(sample.at_s);
    if (!step) continue;
    step.waiting = Math.max(step.waiting ?? 0, sample.waiting);
    step.active = Math.max(step.active ?? 0, sample.active);
  }
  return {
    times: steps.map((_, i) => begin + (i + 1) * stepS),
    firstTokenMedian: steps.map((step) => median(step.firsts)),
    firstTokenP95: steps.map((step) => quantile(step.firsts, 0.95)),
    hitShare: steps.map((step) => (step.prompt ? (100 * step.cached) / step.prompt : null)),
    tokensPerS: steps.map((step) => step.completed / stepS),
    waiting: steps.map((step) => step.waiting),
    active: steps.map((step) => step.active),
  };
}
