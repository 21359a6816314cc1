// The list of runs: how many are chosen, and whether they can be compared.
const form = document.getElementById("compare");
if (form) {
  const most = Number(form.dataset.max), button = document.getElementById("compare-button"), hint = document.getElementById("compare-hint");
  const update = () => {
    const boxes = [...form.querySelectorAll("input[name=run]")], chosen = boxes.filter((box) => box.checked).length;
    button.disabled = chosen < 2 || chosen > most;
    hint.textContent = chosen ? `${chosen} chosen.` : `Choose 2 to ${most} runs.`;
    boxes.forEach((box) => { box.disabled = !box.checked && chosen >= most; });
  };
  form.addEventListener("change", update);
  addEventListener("pageshow", update);
  update();
}
