
// The rollout tree of a group. Samples that share their first denoising steps are on one branch. Each branch shows the
// mean reward of its samples.
function treeOf(group) {
  const root = { step: 0, children: new Map(), leaves: [] };
  for (const one of group) {
    let node = root;
    for (const [step, child] of one.details.path) {
      const key = `${step} ${child}`;
      if (!node.children.has(key)) node.children.set(key, { step, children: new Map(), leaves: [] });
      node = node.children.get(key);
    }
    node.leaves.push(one);
  }
  return root;
}

function leavesOf(node) {
  return [...node.leaves, ...[...node.children.values()].flatMap(leavesOf)];
}

function leaf(one, words) {
  const frame = store.site.text ? null
    : button(picture(one.row, one.cell), () => openPicture(one.row.key), { class: one.same ? "frame own" : "frame" });
  const score = number(scoreOf(one.cell, rewardIndex()));
  return el("li", { class: "leaf" }, frame, el("span", {}, `seed ${one.row.seed}: ${score}`), words && el("span", { class: "muted" }, words));
}

function branch(node, root) {
  const scores = leavesOf(node).map((one) => scoreOf(one.cell, rewardIndex())).filter((score) => score !== null);
  const label = root ? "from the start" : `from step ${node.step}`;
  const children = [...node.children.values()];
  // A branch with one sample is drawn as a leaf.
  const single = (child) => !child.children.size && child.leaves.length === 1;
  return el("li", {}, el("span", { class: "muted small" }, `${label}: mean ${number(mean(scores))} of ${scores.length}`),
    el("ul", { class: "tree" }, ...node.leaves.map((one) => leaf(one, null)),
      ...children.filter(single).map((child) => leaf(child.leaves[0], `from step ${child.step}`)),
      ...children.filter((child) => !single(child)).map((child) => branch(child, false))));
}

function treeSection(group) {
  if (!group.length || !group.every((one) => one.details.path?.length)) return null;
  return section(`Rollout tree, by ${state.reward}`, el("ul", { class: "tree" }, branch(treeOf(group), true)));
}
